"""What the tests of the Redis backend share."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.test.utils import override_settings

from angee_jobs.locks import LockKey, lock_backends
from angee_jobs.locks.backends.redis.backend import RedisLockBackend
from angee_jobs.locks.clock import now
from tests.support.middlebox import Middlebox
from tests.support.servers import RespServer, ValkeyServer

DJANGO = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"


def soon(seconds: float = 5.0) -> float:
    """A deadline."""
    return now() + seconds


def new_name() -> str:
    return LockKey("test", (secrets.token_hex(6),)).name


def new_owner() -> str:
    return secrets.token_hex(16)


def take(backend: RedisLockBackend, name: str, owner: str | None = None, ttl: float = 30.0) -> Any:
    return backend.acquire(name, owner or new_owner(), ttl, '{"host": "h"}', soon())


def fill_memory(client: Any) -> None:
    """Until the server refuses to write, and evicts nothing."""
    import redis

    client.config_set("maxmemory-policy", "noeviction")
    with pytest.raises(redis.RedisError):
        for i in range(10_000):
            client.set(f"filler:{i}", "x" * 10_000)
        raise AssertionError("the memory does not get full")
    client.config_set("maxmemory", "1mb")


def works(backend: RedisLockBackend) -> bool:
    name, owner = new_name(), new_owner()
    return take(backend, name, owner) is not None and backend.release(name, owner, soon())


def calls(server: RespServer, *commands: str) -> int:
    """How often the server was asked to do these, by its own count; those of the tests' client do not run scripts."""
    with server.connect() as client:
        stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in commands)


@contextlib.contextmanager
def running(directory: Any, **options: Any) -> Iterator[ValkeyServer]:
    with ValkeyServer(directory, port=options.pop("port", 0), options=options) as server:
        yield server


def url(server: RespServer, query: str = "") -> str:
    return f"unix://{server.socket_path}{query}"


@contextlib.contextmanager
def backend_for(entry: dict[str, Any], **options: Any) -> Iterator[RedisLockBackend]:
    """The lock backend "temporary" over a cache with that entry in CACHES."""
    if entry["BACKEND"] == DJANGO_REDIS:
        from django_redis.pool import ConnectionFactory

        ConnectionFactory._pools.clear()  # kept by URL alone, whatever the other options are
    locks = {"temporary": {"BACKEND": "angee_jobs.locks.RedisLockBackend", "OPTIONS": {"cache": "temporary"} | options}}
    with override_settings(CACHES={"temporary": entry}, ANGEE_JOBS_LOCKS=locks):
        backend = lock_backends["temporary"]
        assert isinstance(backend, RedisLockBackend)
        try:
            yield backend
        finally:
            backend.stop_watching()
            backend.close()
            # Its server goes now: the renewal thread must not try to release there, and log that into later tests.
            backend.release = lambda name, owner, deadline: True


class FakeServer:
    """Listens on a port of its own and answers as it is told, once the driver's handshake is over.

    ``answer`` gets the words of a request and returns the bytes to send; None closes the connection.
    """

    def __init__(self, answer: Callable[[list[bytes]], bytes | None]) -> None:
        self._answer = answer
        self._last: socket.socket | None = None
        self.requests: list[list[bytes]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()

    @property
    def cache(self) -> dict[str, Any]:
        return {"BACKEND": DJANGO, "LOCATION": f"redis://127.0.0.1:{self.port}"}

    def say(self, unasked: bytes) -> None:
        """Send something on the connection of the last request."""
        assert self._last is not None
        self._last.sendall(unasked)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError, ValueError):
            while line := stream.readline():
                words = []
                for _ in range(int(line[1:])):
                    words.append(stream.read(int(stream.readline()[1:])))
                    stream.read(2)
                if words[0] == b"CLIENT":
                    connection.sendall(b"+OK\r\n")
                    continue
                self.requests.append(words)
                self._last = connection
                answer = self._answer(words)
                if answer is None:
                    return
                connection.sendall(answer)


class Cutter(Middlebox):
    """Closes the client's side of a connection at a moment of the test's choice. The server's side stays open."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        #: Set: the next request does not pass, see deliver().
        self.hold_back = False
        #: Called when the next answer arrives, which does not pass.
        self.instead_of_an_answer: Callable[[], object] | None = None
        self.held_back: list[tuple[socket.socket, bytes]] = []
        self.answered = threading.Event()

    def deliver(self) -> None:
        """Pass on what was held back, and wait for its answer."""
        self.answered.clear()
        for server, data in self.held_back:
            server.sendall(data)
        assert self.answered.wait(10)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        from_client = source.family == socket.AF_INET
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if from_client and self.hold_back:
                    self.hold_back = False
                    self.held_back.append((sink, data))
                    source.shutdown(socket.SHUT_RDWR)
                    return
                if not from_client:
                    self.answered.set()
                    act, self.instead_of_an_answer = self.instead_of_an_answer, None
                    if act is not None:
                        act()
                        sink.shutdown(socket.SHUT_RDWR)
                        return
                if source not in self._forgotten:
                    sink.sendall(data)
            if source not in self._forgotten:
                sink.shutdown(socket.SHUT_RDWR)
