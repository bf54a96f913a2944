"""The contract suite over Redis and Valkey."""

import contextlib
import signal
import unittest
from collections.abc import Iterator
from typing import Any

import pytest

from angee_jobs.locks import LockKey, lock_backends, testing
from tests.support.servers import RespServer
from tests.support.strategies import OurStrategy


class Redis(OurStrategy):
    """A server, and an alias that leads to it."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.server: RespServer | None = None

    def client(self) -> Any:
        assert self.server is not None
        return self.server.connect(db=1 if self.alias == "django_redis" else 0)

    def delete_hold(self, key: LockKey) -> None:
        with self.client() as client:
            prefix = lock_backends[self.alias].prefix  # type: ignore[attr-defined]
            assert client.delete(f"{prefix}hold:{key.name}") == 1

    def empty(self) -> None:
        with self.client() as client:
            client.flushall()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        assert self.server is not None
        with self.server.hanging():
            yield

    @contextlib.contextmanager
    def unreachable(self) -> Iterator[None]:
        """The socket away, and all connections ended; what is stored stays."""
        assert self.server is not None
        path, away = self.server.socket_path, self.server.socket_path.with_suffix(".away")
        path.rename(away)
        try:
            with self.server.connect(unix_socket_path=str(away)) as client:
                others = [entry["id"] for entry in client.client_list() if entry["name"] != "tests-admin"]
                for number in others:
                    client.client_kill_filter(_id=number)
            yield
        finally:
            away.rename(path)

    def break_connections(self) -> None:
        assert self.server is not None
        self.server.terminate_all()

    def tear_down(self) -> None:
        assert self.server is not None
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGCONT)


class TestValkeyThroughDjango(testing.LockContract, unittest.TestCase):
    strategy = Redis("redis")

    @pytest.fixture(autouse=True)
    def _server(self, valkey: RespServer) -> None:
        self.strategy.server = valkey


class TestValkeyThroughDjangoRedis(testing.LockContract, unittest.TestCase):
    strategy = Redis("django_redis")

    @pytest.fixture(autouse=True)
    def _server(self, valkey: RespServer) -> None:
        self.strategy.server = valkey


class TestRedis7(testing.LockContract, unittest.TestCase):
    strategy = Redis("redis7")

    @pytest.fixture(autouse=True)
    def _server(self, redis7: RespServer) -> None:
        self.strategy.server = redis7
