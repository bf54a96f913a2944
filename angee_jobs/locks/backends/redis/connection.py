"""Connections to the server of a cache alias, driven directly.

A connection is made by the class and with the arguments that the cache's own pool has, so that URL, TLS, password,
Unix socket and Sentinel are honoured. Once it is connected, requests and replies go over its socket without
redis-py: that is where the time goes, and it is what allows a deadline for the whole of a request, and what makes
serializers, ``decode_responses`` and the protocol's version irrelevant.

They are the locks' own connections, not the pool's. So a lock never waits for the cache's traffic to end, and nothing
that the project does to its pool (limits, ``disconnect()``, closing at a request's end) touches one.

A connection is kept for the next request only when its last one was answered in full. Whatever else happened to it, be
it an exception of a signal handler at any instruction, ends it: a pending reply would be taken for the next one's.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import hashlib
import importlib.resources
import queue
import select
import socket
import ssl
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ... import clock, process
from ...errors import LockBackendError
from .cache import CacheAlias

#: An idle connection is closed after so many seconds.
IDLE_SECONDS = 60.0
#: Replies that begin so come from a server that is not, or no longer, the one to talk to. Nothing was carried out.
_WRONG_SERVER = ("READONLY", "MASTERDOWN", "LOADING", "NOAUTH")
_DEEPEST = 8
#: How long a socket blocks, in seconds.
SLICE_SECONDS = 0.05
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ErrorReply(Exception):
    """The server's answer is an error: it has refused the request."""


class Garbled(Exception):
    """What arrived is not an answer in the server's protocol."""


def pack(*words: bytes) -> bytes:
    """A request in the server's protocol."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class Script:
    """A file of ``lua/``, called by its digest."""

    __slots__ = ("_by_body", "_by_digest", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        body = importlib.resources.files(__package__).joinpath("lua", f"{name}.lua").read_bytes()
        digest = hashlib.sha1(body, usedforsecurity=False).hexdigest().encode()
        self._by_digest = b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % digest
        self._by_body = b"$4\r\nEVAL\r\n$%d\r\n%b\r\n" % (len(body), body)

    def request(self, keys: Sequence[bytes], args: Sequence[bytes], *, by_body: bool = False) -> bytes:
        count = b"%d" % len(keys)
        words = [b"$%d\r\n%b\r\n" % (len(word), word) for word in (count, *keys, *args)]
        return b"*%d\r\n%b%b" % (2 + len(words), self._by_body if by_body else self._by_digest, b"".join(words))


class Wire:
    """One connection. Used by one thread at a time.

    A read on the socket itself blocks for a slice of the wait at most, which saves asking ``poll`` first; what TLS
    has read is not the socket's to tell, so there it never blocks.
    """

    __slots__ = ("_blocks", "_buffer", "_driver", "_poll", "_position", "generation", "sock", "used_at")

    def __init__(self, driver: Any) -> None:
        sock = driver._sock
        if not isinstance(sock, socket.socket):
            raise ConnectionError(f"{type(driver).__name__} has no socket of its own")
        self._blocks = _block_for_slices(sock)
        self._driver = driver  # keeps the socket open
        self.sock = sock
        self._buffer = b""
        self._position = 0
        self._poll = _poll(sock)
        self.generation = process.generation
        self.used_at = 0.0

    def usable(self) -> bool:
        """Whether another request may be sent. What can be read now is the server's end, or nothing that was asked."""
        return not self._poll(0) and self.generation == process.generation

    def ask(self, request: bytes, deadline: float) -> Any:
        """The reply to a request. TimeoutError, another OSError, or Garbled: the connection is of no use any more."""
        self.send(request, deadline)
        reply = self.read(deadline)
        if self._position != len(self._buffer):
            raise Garbled("more than one answer to one request")
        self.used_at = clock.now()
        return reply

    def send(self, request: bytes, deadline: float) -> None:
        while True:
            try:
                sent = self.sock.send(request)
            except _WOULD_BLOCK:
                sent = 0
            if sent == len(request):
                return
            request = request[sent:]
            left = deadline - clock.now()
            if left <= 0:
                raise TimeoutError("the request could not be sent in time")
            _wait_to_write(self.sock, min(left, 0.1))

    def readable(self) -> bool:
        """Whether something is there to be read."""
        return self._position != len(self._buffer) or bool(self._poll(0))

    def read(self, deadline: float, depth: int = 0) -> Any:
        """One value: bytes, int, None, ErrorReply, or a list of such."""
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(rest.decode(errors="replace"))
        try:
            number = int(rest)
        except ValueError:
            raise Garbled(f"not an answer: {line[:100]!r}") from None
        if kind == b":":
            return number
        if kind not in (b"$", b"*") or number < -1 or depth > _DEEPEST:
            raise Garbled(f"not an answer: {line[:100]!r}")
        if number == -1:
            return None
        if kind == b"*":
            return [self.read(deadline, depth + 1) for _ in range(number)]
        while len(self._buffer) < self._position + number + 2:
            self._fill(deadline)
        start = self._position
        self._position = end = start + number + 2
        if self._buffer[end - 2 : end] != b"\r\n":
            raise Garbled("an answer of another length than it says")
        return self._buffer[start : end - 2]

    def _line(self, deadline: float) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._position)) < 0:
            self._fill(deadline)
        line = self._buffer[self._position : end]
        self._position = end + 2
        return line

    def _fill(self, deadline: float) -> None:
        while True:
            left = deadline - clock.now()
            if left <= 0:
                raise TimeoutError("the answer did not arrive in time")
            if (self._blocks and left > SLICE_SECONDS) or self._poll(left * 1000 + 1):
                try:
                    chunk = self.sock.recv(65536)
                    break
                except _WOULD_BLOCK:  # the slice is over, or TLS has read only a part of what it needs
                    pass
        if not chunk:
            raise ConnectionError("the server closed the connection")
        self._buffer = self._buffer[self._position :] + chunk
        self._position = 0

    def close(self, *, abort: bool = False) -> None:
        """``abort``: take back what was sent, as far as it has not arrived."""
        if abort and self.sock.family != getattr(socket, "AF_UNIX", None):
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(Exception):
            self._driver.disconnect()


def _block_for_slices(sock: socket.socket) -> bool:
    """Whether the socket blocks from now on, for ``SLICE_SECONDS`` at most; else it does not at all."""
    if not isinstance(sock, ssl.SSLSocket) and sys.platform != "win32":
        seconds = struct.pack("@ll", 0, int(SLICE_SECONDS * 1e6))
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            sock.setblocking(True)
            return True
    sock.setblocking(False)
    return False


def _poll(sock: socket.socket) -> Callable[[float], object]:
    """A function that waits, at most so many milliseconds, until something can be read, and tells whether it can."""
    if hasattr(select, "poll"):
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        poll: Callable[[float], object] = poller.poll
    else:
        poll = functools.partial(_select, sock)
    pending = getattr(sock, "pending", None)  # what TLS has read already
    return poll if pending is None else lambda milliseconds: pending() or poll(milliseconds)


def _wait_to_write(sock: socket.socket, seconds: float) -> None:
    if hasattr(select, "poll"):
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        poller.poll(seconds * 1000)
    else:
        select.select([], [sock], [], seconds)


def _select(sock: socket.socket, milliseconds: float) -> object:
    return select.select([sock], [], [], milliseconds / 1000)[0]


class Connections:
    """The connections of one backend: as many as there are requests at the same time."""

    def __init__(self, cache: CacheAlias) -> None:
        self._cache = cache
        self._forget()
        _instances.add(self)

    def _forget(self) -> None:
        """After a fork: the parent's are only dropped. Their descriptors get closed, which does nothing to a parent."""
        self._idle: list[Wire] = []

    def close(self) -> None:
        """Close what is idle now."""
        idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def run(
        self, script: Script, keys: Sequence[bytes], args: Sequence[bytes], deadline: float, *, again: bool = True
    ) -> tuple[Any, bool]:
        """The script's answer, and whether it may have been run before, on a connection that broke.

        ``again`` allows that. LockBackendError if there is no answer, or it is an error.
        """
        reply, repeated = self.ask(script.request(keys, args), deadline, again=again)
        if type(reply) is ErrorReply and reply.args[0].startswith("NOSCRIPT"):
            reply, repeated = self.ask(script.request(keys, args, by_body=True), deadline, again=again)
        if type(reply) is ErrorReply:
            raise LockBackendError(f"{self._cache} refused to {script.name}: {reply}") from driver_error(reply)
        return reply, repeated

    def ask(self, request: bytes, deadline: float, *, again: bool = True) -> tuple[Any, bool]:
        """The same for any request. An error reply is returned."""
        sent = False
        wire = self._take()
        while True:
            is_new = wire is None
            if wire is None:
                wire = self.open(deadline, uncertain=sent)
            repeated, sent = sent, True
            try:
                reply = wire.ask(request, deadline)
            except TimeoutError as error:
                wire.close(abort=True)
                raise self._failed(f"gave no answer in time: {error}", uncertain=True) from error
            except (OSError, Garbled) as error:
                wire.close(abort=True)
                if is_new or not again or isinstance(error, Garbled):
                    raise self._failed(f"gave no answer: {error}", uncertain=True) from error
                wire = None  # it may have been dead for long: one more try, on a new one
                continue
            except BaseException:
                wire.close(abort=True)
                raise
            if type(reply) is ErrorReply and reply.args[0].startswith(_WRONG_SERVER):
                wire.close()
                self.close()
                if not is_new:  # it was the right one when this connection was made
                    wire, sent = None, repeated
                    continue
            else:
                self._give_back(wire)
            return reply, repeated

    def _take(self) -> Wire | None:
        while True:
            try:
                wire = self._idle.pop()
            except IndexError:
                return None
            if wire.usable():
                return wire
            wire.close()

    def _give_back(self, wire: Wire) -> None:
        idle = self._idle
        idle.append(wire)
        if idle[0].used_at < wire.used_at - IDLE_SECONDS:
            try:
                oldest = idle.pop(0)
            except IndexError:
                return
            if oldest.used_at < wire.used_at - IDLE_SECONDS:
                oldest.close()
            else:  # another thread was faster
                idle.append(oldest)

    def open(self, deadline: float, *, uncertain: bool = False) -> Wire:
        """A new connection.

        Connecting is many steps (the look-up of the host, Sentinels, TLS, the password), and not all of them know a
        deadline. So a thread does it, and whoever has no time left leaves it alone. The first one also imports the
        driver there, where no signal handler's exception can leave a module half-imported.
        """
        answers: queue.SimpleQueue[Wire | Exception] = queue.SimpleQueue()
        left_alone = False

        def connect() -> None:
            try:
                with process.importing:
                    pool = self._cache.pool()
                wire = Wire(_connected(pool, deadline))
            except Exception as error:
                answers.put(error)
                return
            if left_alone:
                wire.close()
            else:
                answers.put(wire)

        try:
            try:
                # One call in C. Thread.start() is many in Python, which a signal handler's exception leaves half-way.
                _thread.start_new_thread(connect, ())
            except RuntimeError:  # at the interpreter's exit, or the system's limit
                connect()
            answer = answers.get(timeout=max(0.001, deadline - clock.now()))
        except queue.Empty:
            left_alone = True
            error = TimeoutError("not connected in time")
            raise self._failed("cannot be reached in time", uncertain=uncertain) from error
        except BaseException:
            left_alone = True
            raise
        if isinstance(answer, ImproperlyConfigured):
            raise answer
        if isinstance(answer, Exception):
            raise self._failed(f"cannot be reached: {answer}", uncertain=uncertain) from answer
        return answer

    def _failed(self, what: str, *, uncertain: bool) -> LockBackendError:
        return LockBackendError(f"{self._cache} {what}", uncertain=uncertain)


def _connected(pool: Any, deadline: float) -> Any:
    """A connection such as ``pool`` makes, but with a limit, without retries, and in the protocol that we speak."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    left = max(0.001, deadline - clock.now())
    options = dict(pool.connection_kwargs)
    options["socket_timeout"] = left
    options["socket_connect_timeout"] = min(left, options.get("socket_connect_timeout") or left)
    options["retry"] = Retry(NoBackoff(), 0)
    if int(redis.__version__.partition(".")[0]) >= 5:
        options["protocol"] = 2
    options["decode_responses"] = False
    options["health_check_interval"] = 0
    for name in list(options):
        # Notices of maintenance need another version of the protocol, and a pool that listens to them.
        if name.startswith("retry_on_") or "maint_notifications" in name:
            del options[name]
    driver = pool.connection_class(**options)
    driver.connect()
    return driver


def driver_error(reply: ErrorReply) -> Exception:
    """The driver's form of an error reply."""
    from redis.exceptions import ResponseError

    return ResponseError(str(reply))


_instances: weakref.WeakSet[Connections] = weakref.WeakSet()


def _after_fork() -> None:
    for connections in list(_instances):
        connections._forget()


process.on_fork(in_child=_after_fork)
