"""Waiting for notifications of PostgreSQL on a session of its own."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import weakref
from collections.abc import Collection

from ... import clock, process
from ...errors import LockBackendError
from .errors import NoAnswer, SessionLost, driver_error
from .session import Session
from .statements import Statement

#: How long connecting may take, in seconds.
CONNECT_SECONDS = 5.0


class Listener:
    """LISTENs on one channel for one thread at a time; any other thread may :meth:`stop` it."""

    def __init__(self, alias: str, channel: str, *, through_pooler: bool = False) -> None:
        self.alias = alias
        self.through_pooler = through_pooler
        self._listen = Statement(f"LISTEN {channel}")
        self._reset()
        _listeners.add(self)

    def _reset(self) -> None:
        self._in_use = threading.Lock()
        self._stop = False
        self._session: Session | None = None
        # Both ends of the waker, once there are some. Open as long as the listener lives: a waker must not meet another
        # file with the same number.
        self._waker: tuple[socket.socket, socket.socket] | None = None

    def wait(self, seconds: float) -> Collection[str] | None:
        """The payloads of the notifications that came within ``seconds``; None: some may have been missed.

        LockBackendError if there is no connecting.
        """
        process.check()
        try:
            with self._in_use:
                return self._wait(seconds)
        except (SessionLost, NoAnswer, OSError) as error:
            self._drop()
            raise LockBackendError(
                f"The session that listens on the database {self.alias!r} failed: {error}"
            ) from driver_error(error)
        finally:
            if self._stop:
                self.stop()

    def _wait(self, seconds: float) -> Collection[str] | None:
        if self._waker is None:
            self._waker = socket.socketpair()
            self._waker[1].setblocking(False)
        session = self._session
        if session is not None and not session.look():
            self._drop()
            session = None
        if session is None:
            deadline = clock.now() + CONNECT_SECONDS
            session = self._session = Session(self.alias, deadline, fallback_application_name="angee_jobs waiting")
            if not session.direct and not self.through_pooler:
                # It would be the server's connection that listens, also for its next client.
                self._drop()
                raise LockBackendError(f"Nothing can be heard through the pooler in front of {self.alias!r}")
            session.execute(self._listen, (), deadline)
            return None  # what was sent before now has not been heard
        end = clock.now() + seconds
        woken = self._waker[0]
        while not session.notifications and (left := end - clock.now()) > 0:
            ready = _readable([session.fileno(), woken.fileno()], left)
            if woken.fileno() in ready:
                woken.recv(4096)
                return ()
            if ready and not session.look():
                raise SessionLost("the server has closed the connection", sent=False)
        heard, session.notifications = session.notifications, []
        return [payload for _, payload in heard]

    def stop(self) -> None:
        """Close the session, and let :meth:`wait` return at once. It may be called again later."""
        process.check()
        self._stop = True
        if self._in_use.acquire(blocking=False):
            try:
                self._stop = False
                self._drop()
            finally:
                self._in_use.release()
        elif self._waker is not None:  # the thread in there closes it
            with contextlib.suppress(OSError):
                self._waker[1].send(b"x")

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _readable(fds: list[int], seconds: float) -> list[int]:
    """Wait for any of them; without a descriptor for that, which may not be had."""
    if not hasattr(select, "poll"):  # Windows
        return list(select.select(fds, [], [], seconds)[0])
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(min(seconds * 1000, 2**31 - 1))]


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _after_fork() -> None:
    for listener in list(_listeners):
        listener._reset()


process.on_fork(in_child=_after_fork)
