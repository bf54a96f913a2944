"""One connection to the server of a cache alias, driven directly, and the server's protocol.

The driver connects, with the class and the arguments that the cache's own pool has, so that URL, TLS, password, Unix
socket and Sentinel are honoured. Once it is connected, requests and replies go over its socket without redis-py: that
is where the time goes, and it is what allows a deadline for the whole of a request, and what makes serializers,
``decode_responses`` and the protocol's version irrelevant.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import select
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ... import clock, process

_DEEPEST = 8
#: How long a socket blocks, in seconds.
SLICE_SECONDS = 0.05
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ErrorReply(Exception):
    """The server's answer is an error: it has refused the request."""

    @property
    def code(self) -> str:
        """Its first word, which says what kind of error it is."""
        return str(self).partition(" ")[0]


class Garbled(Exception):
    """What arrived is not an answer in the server's protocol."""


def pack(*words: bytes) -> bytes:
    """A request in the server's protocol."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class Script:
    """A file of ``lua/``, after those that it stands on, called by its digest."""

    __slots__ = ("_by_body", "_by_digest", "name")

    def __init__(self, name: str, *preludes: str) -> None:
        self.name = name
        files = importlib.resources.files(__package__).joinpath("lua")
        body = b"".join(files.joinpath(f"{each}.lua").read_bytes() for each in (*preludes, name))
        digest = hashlib.sha1(body, usedforsecurity=False).hexdigest().encode()
        self._by_digest = b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % digest
        self._by_body = b"$4\r\nEVAL\r\n$%d\r\n%b\r\n" % (len(body), body)

    def request(self, keys: Sequence[bytes], args: Sequence[bytes], *, by_body: bool = False) -> bytes:
        count = b"%d" % len(keys)
        words = [b"$%d\r\n%b\r\n" % (len(word), word) for word in (count, *keys, *args)]
        return b"*%d\r\n%b%b" % (2 + len(words), self._by_body if by_body else self._by_digest, b"".join(words))


class Connection:
    """One connection. Used by one thread at a time.

    A read on the socket itself blocks for a slice of the wait at most, which saves asking ``poll`` first; what TLS
    has read is not the socket's to tell, so there it never blocks.
    """

    __slots__ = ("__weakref__", "_blocks", "_buffer", "_driver", "_generation", "_poll", "_position", "sock", "used_at")

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
        self._generation = process.generation
        #: When its last answer arrived in full, on the local clock; 0: it is new.
        self.used_at = 0.0

    def usable(self) -> bool:
        """Whether another request may be sent. What can be read now is the server's end, or an answer to nothing."""
        return not self._poll(0) and self._generation == process.generation

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

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


def connect(pool: Any, deadline: float) -> Connection:
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
    return Connection(driver)


def driver_error(reply: ErrorReply) -> Exception:
    """The driver's form of an error reply."""
    from redis.exceptions import ResponseError

    return ResponseError(str(reply))


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
