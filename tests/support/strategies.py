"""How the contract suite makes each backend's storage misbehave. One small class per backend."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import Any

from angee_jobs.locks import LockKey, lock_backends
from angee_jobs.locks.testing import Strategy
from angee_jobs.locks.transactions import deferred_releases
from angee_jobs.locks.waiting import waiters_of
from tests.support.servers import PostgresServer


class OurStrategy(Strategy):
    """Looks also at what the policy may leave behind in this process."""

    def leftovers(self) -> list[str]:
        backend = lock_backends.operations(self.alias)
        waiting = [f"a caller waits for {name}" for name in list(waiters_of(backend).queues)]
        kept = [name for at, name, _ in list(deferred_releases) if at is backend]
        return waiting + [f"{name} is kept for a transaction" for name in kept]


class Local(OurStrategy):
    alias = "local"
    lacks = {
        "processes": "it lives in one process",
        "push": "there is no other process to hear of",
        "empty": "it lives in one process and is gone with it",
        "hanging": "there is no server",
        "unreachable": "there is no server",
        "break_connections": "there are no connections",
    }


class SqliteTable(OurStrategy):
    alias = "sqlite"
    lacks = {
        "push": "SQLite tells nobody of a write",
        "break_connections": "there is no server that could end them",
    }

    def path(self) -> str:
        return lock_backends[self.alias].path()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """The lock file as a stranger opens it."""
        connection = sqlite3.connect(self.path(), timeout=5, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()

    def delete_hold(self, key: LockKey) -> None:
        with self.connect() as connection:
            deleted = connection.execute("DELETE FROM lock WHERE name = ? AND owner <> ''", [key.name]).rowcount
            assert deleted == 1

    def empty(self) -> None:
        with self.connect() as connection:
            connection.execute("DELETE FROM lock")
            connection.execute("DELETE FROM member")

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """A stranger that writes to the file and does not end."""
        with self.connect() as connection:
            connection.execute("BEGIN EXCLUSIVE")
            yield
            connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def unreachable(self) -> Iterator[None]:
        """A file that SQLite refuses to open, in the place of the lock file."""
        backend: Any = lock_backends[self.alias]
        path = self.path()
        # Nobody opens anything between the two halves of a change: the renewal thread would make a new file.
        with backend.file.mutex:
            backend.close()
            os.rename(path, path + ".away")
            os.mkdir(path)
        try:
            yield
        finally:
            with backend.file.mutex:
                os.rmdir(path)
                os.rename(path + ".away", path)

    def leftovers(self) -> list[str]:
        with self.connect() as connection:
            try:
                connection.execute("PRAGMA busy_timeout = 0")
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
            except sqlite3.OperationalError as error:
                return [*super().leftovers(), f"somebody writes to the lock file: {error}"]
        return super().leftovers()


class PostgresTable(OurStrategy):
    alias = "postgres_table"
    databases = ("postgres", "default")

    def __init__(self) -> None:
        self.server: PostgresServer | None = None

    def _server(self) -> PostgresServer:
        assert self.server is not None
        return self.server

    def delete_hold(self, key: LockKey) -> None:
        [(deleted,)] = self._server().query(
            "WITH gone AS (DELETE FROM angee_jobs_tasklock WHERE name = %s AND owner <> '' RETURNING 1)"
            " SELECT count(*) FROM gone",
            [key.name],
        )
        assert deleted == 1

    def empty(self) -> None:
        self._server().query("TRUNCATE angee_jobs_tasklock, angee_jobs_lockmember")

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        with self._server().hanging():
            yield

    @contextlib.contextmanager
    def unreachable(self) -> Iterator[None]:
        server = self._server()
        server.query("ALTER DATABASE angee_tests ALLOW_CONNECTIONS false", dbname="postgres")
        try:
            for session in server_sessions(server):
                server_terminate(server, session)
            yield
        finally:
            server.query("ALTER DATABASE angee_tests ALLOW_CONNECTIONS true", dbname="postgres")

    def break_connections(self) -> None:
        for pid in server_sessions(self._server()):
            server_terminate(self._server(), pid)

    def leftovers(self) -> list[str]:
        rows = self._server().query(
            "SELECT pid, state, query FROM pg_stat_activity WHERE backend_type = 'client backend'"
            " AND pid <> pg_backend_pid() AND state <> 'idle' AND application_name <> 'tests-admin'",
            dbname="postgres",
        )
        locks = self._server().query("SELECT pid, mode FROM pg_locks WHERE locktype = 'advisory'", dbname="postgres")
        found = [f"session {row}" for row in rows] + [f"advisory lock {row}" for row in locks]
        return [*super().leftovers(), *found]


def server_sessions(server: PostgresServer) -> list[int]:
    rows = server.query(
        "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = 'angee_tests'"
        " AND pid <> pg_backend_pid()",
        dbname="postgres",
    )
    return [pid for (pid,) in rows]


def server_terminate(server: PostgresServer, pid: int) -> None:
    server.query("SELECT pg_terminate_backend(%s, 5000)", [pid], dbname="postgres")
