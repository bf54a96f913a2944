"""How a waiter hears of releases in other processes: one connection per process that subscribes to what is waited for.

Each lock has a channel of its own, so that a process hears only of locks that it waits for, and a release that nobody
waits for costs the server a look into an empty table.

Only the thread that calls wait() uses the connection, since a TLS socket serves one thread at a time. Others note what
they want and wake it.
"""

from __future__ import annotations

import select
import socket
import weakref
from collections.abc import Callable, Collection

from ... import clock, process
from ...errors import LockBackendError
from .connection import Connection, ErrorReply, Garbled, pack
from .pool import Connections

#: A channel is given up when nobody has asked about its lock for so many seconds. Waiters ask every second.
FORGET_SECONDS = 10.0
#: Where SUBSCRIBE is not permitted, it is tried again after so many seconds.
REFUSED_SECONDS = 60.0
#: After so many silent seconds the server is asked for a sign of life, and has as many to give one.
SILENT_SECONDS = 10.0
#: How long sending to the server may take.
SEND_SECONDS = 1.0


class Watcher:
    """See the module."""

    def __init__(self, connections: Connections, prefix: Callable[[], str]) -> None:
        self._connections = connections
        self._prefix = prefix
        self._reset()
        _instances.add(self)

    def _reset(self) -> None:
        """After a fork: drop what the parent watched, and its connection."""
        self._wanted: dict[str, float] = {}
        self._subscribed: dict[str, bool] = {}  # whether it is confirmed
        self._connection: Connection | None = None
        self._waker: tuple[socket.socket, socket.socket] | None = None
        self._inside = False
        self._stopping = False
        self._refused_until = 0.0
        self._heard_at = 0.0
        self._asked_for_life = False

    def channel(self, name: str) -> bytes:
        return f"{self._prefix()}free:{name}".encode()

    # Called from any thread.

    def want(self, name: str) -> None:
        """Subscribe to ``name``, for a waiter that looks at it next.

        The subscription may come later than that look. Then ``name`` counts as changed, so that the waiter looks again.
        """
        process.check()
        now = self._wanted[name] = clock.now()
        if name not in self._subscribed and now >= self._refused_until:
            self._wake()

    def stop(self) -> None:
        # Without a mutex, which a signal handler's exception might leave locked. A wait that begins just now may lose
        # its connection to this, and makes another one.
        process.check()
        self._stopping = True
        self._wake()
        if not self._inside:
            self._end()

    def _end(self) -> None:
        self._hang_up()
        self._wanted.clear()
        waker, self._waker = self._waker, None
        for end in waker or ():
            end.close()
        self._stopping = False

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        self._subscribed = {}
        if connection is not None:
            connection.close()

    def _wake(self) -> None:
        waker = self._waker
        if waker is not None:
            try:
                waker[1].send(b"!")
            except OSError:  # full: it wakes anyway
                pass

    # On the thread that waits.

    def wait(self, seconds: float) -> Collection[str] | None:
        """As ``wait_for_change`` of the backend."""
        process.check()
        self._inside = True
        try:
            if self._stopping:
                return ()
            if self._waker is None:
                waker = socket.socketpair()
                for end in waker:
                    end.setblocking(False)
                self._waker = waker
            return self._wait(clock.now() + seconds)
        except (OSError, ValueError, Garbled) as error:  # ValueError: closed by stop() just now
            self._hang_up()
            raise LockBackendError(f"The connection that hears of releases broke: {error}") from error
        except BaseException:
            self._hang_up()
            raise
        finally:
            self._inside = False
            if self._stopping:
                self._end()

    def _wait(self, deadline: float) -> Collection[str] | None:
        is_new = False
        if self._connection is None:
            self._forget_old()
            if clock.now() < self._refused_until:
                return self._sleep_deaf(deadline)
            self._connection = self._connections.open(deadline)
            self._heard_at, self._asked_for_life = clock.now(), False
            is_new = True
        connection = self._connection
        heard: set[str] = set()
        while not self._stopping:
            self._update(connection)
            if is_new and all(self._subscribed.values()):
                return None  # nobody heard of releases before this
            if heard and not connection.readable():
                return heard
            now = clock.now()
            if now >= deadline:
                return None if is_new else heard
            if connection.readable() or self._sleep(connection, deadline):
                message = connection.read(now + SEND_SECONDS)
                if isinstance(message, ErrorReply):
                    if not str(message).startswith(("NOPERM", "ERR unknown command")):
                        raise Garbled(str(message))
                    self._hang_up()
                    self._refused_until = now + REFUSED_SECONDS
                    return self._sleep_deaf(deadline)
                self._note(message, heard)
        return ()

    def _sleep(self, connection: Connection | None, deadline: float) -> bool:
        """Sleep until something arrives (True), the waker is used, or the deadline."""
        waker = self._waker
        if waker is None:
            raise OSError("stopped just now")
        left = max(0.0, deadline - clock.now())
        sockets = [waker[0]] if connection is None else [waker[0], connection.sock]
        if hasattr(select, "poll"):
            poll = select.poll()
            for each in sockets:
                poll.register(each, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(left * 1000 + 0.5)}
        else:
            ready = {each.fileno() for each in select.select(sockets, [], [], left)[0]}
        if waker[0].fileno() in ready:
            waker[0].recv(65536)
        return connection is not None and connection.sock.fileno() in ready

    def _sleep_deaf(self, deadline: float) -> Collection[str]:
        while not self._stopping and clock.now() < deadline:
            self._sleep(None, deadline)
        return ()

    def _update(self, connection: Connection) -> None:
        """Subscribe to what is wanted, and no longer to what is not."""
        now = clock.now()
        old = [name for name in self._forget_old() if self._subscribed.pop(name, None) is not None]
        if old:
            connection.send(pack(b"UNSUBSCRIBE", *map(self.channel, old)), now + SEND_SECONDS)
        new = [name for name in list(self._wanted) if name not in self._subscribed]
        if new:
            for name in new:
                self._subscribed[name] = False
            connection.send(pack(b"SUBSCRIBE", *map(self.channel, new)), now + SEND_SECONDS)
        silence = now - self._heard_at
        if silence > 2 * SILENT_SECONDS and self._asked_for_life:
            raise TimeoutError("the server gives no sign of life")
        if silence > SILENT_SECONDS and not self._asked_for_life:
            self._asked_for_life = True
            connection.send(pack(b"PING"), now + SEND_SECONDS)

    def _forget_old(self) -> list[str]:
        """Drop and return the names that no waiter has asked about for a while."""
        limit = clock.now() - FORGET_SECONDS
        old = [name for name, asked_at in list(self._wanted.items()) if asked_at < limit]
        for name in old:
            self._wanted.pop(name, None)
        return old

    def _note(self, message: object, heard: set[str]) -> None:
        self._heard_at, self._asked_for_life = clock.now(), False
        if message == b"PONG":  # the server says so where nothing is subscribed
            return
        if not isinstance(message, list) or len(message) < 2 or not isinstance(message[0], bytes):
            raise Garbled(f"not a message: {message!r:.100}")
        kind, channel = message[0], message[1]
        if kind not in (b"message", b"subscribe") or not isinstance(channel, bytes):
            return
        name = channel.removeprefix(self.channel("")).decode(errors="replace")
        if kind == b"message":
            heard.add(name)
        elif self._subscribed.get(name) is False:
            self._subscribed[name] = True
            heard.add(name)


_instances: weakref.WeakSet[Watcher] = weakref.WeakSet()


def _reset_in_child() -> None:
    for watcher in list(_instances):
        watcher._reset()


process.on_fork(in_child=_reset_in_child)
