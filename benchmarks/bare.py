"""The limit that driver and server set: the fewest statements that exclude, without any promise around them."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import settings
from benchmarks.contenders import TTL, Contender, Void


class Bare(Contender):
    """Acquire and release are one statement each."""

    tells = True

    def acquire(self, key: str) -> object:
        raise NotImplementedError

    def release(self, key: str) -> object:
        raise NotImplementedError

    def block(self, key: str, timeout: float | None = None) -> Any:
        @contextlib.contextmanager
        def block() -> Iterator[bool]:
            acquired = bool(self.acquire(key))
            yield acquired
            if acquired:
                self.release(key)

        return block

    def take(self, key: str) -> Callable[[], object] | None:
        return (lambda: self.release(key)) if self.acquire(key) else None

    def of_thread(self) -> Contender:
        return type(self)()  # a connection of its own

    def blocks(self, key: str, times: int) -> None:
        self.pairs(key, times)

    def pairs(self, key: str, times: int) -> None:
        acquire, release = self.acquire, self.release
        for _ in range(times):
            if not acquire(key) or not release(key):
                raise Void(f"refused {key} that nobody holds, or lost it")


class BareSqlite(Bare):
    """Two statements through ``sqlite3`` on a file in WAL mode."""

    def __init__(self) -> None:
        self._owner = secrets.token_hex(16)
        self._connection = sqlite3.connect(
            settings.DIR / "bare.db", isolation_level=None, timeout=5, check_same_thread=False
        )
        for statement in (
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = NORMAL",
            "CREATE TABLE IF NOT EXISTS lock (name TEXT PRIMARY KEY, owner TEXT, expires REAL) WITHOUT ROWID",
        ):
            self._connection.execute(statement)

    def acquire(self, key: str) -> object:
        now = time.time()
        return self._connection.execute(
            "INSERT INTO lock VALUES (?1, ?2, ?3) ON CONFLICT (name) DO UPDATE SET owner = ?2, expires = ?3 "
            "WHERE expires <= ?4",
            (key, self._owner, now + TTL, now),
        ).rowcount

    def release(self, key: str) -> object:
        return self._connection.execute(
            "UPDATE lock SET expires = 0 WHERE name = ? AND owner = ?", (key, self._owner)
        ).rowcount

    def is_held(self, key: str) -> bool:
        sql = "SELECT 1 FROM lock WHERE name = ? AND expires > ?"
        return self._connection.execute(sql, (key, time.time())).fetchone() is not None


class _Psycopg(Bare):
    """Prepared statements on one connection in autocommit mode."""

    def __init__(self) -> None:
        import psycopg

        self._connection: Any = psycopg.connect(
            host=str(settings.POSTGRES_DIR),
            port=settings.POSTGRES_PORT,
            user="postgres",
            dbname="angee_tests",
            autocommit=True,
            prepare_threshold=0,
        )
        self._cursor = self._connection.cursor()


class BarePostgres(_Psycopg):
    """Two statements on a table with one index; both commits are durable, as the server's default is."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = secrets.token_hex(16)
        self._cursor.execute("SELECT pg_advisory_lock(1)")  # IF NOT EXISTS does not help two that come at once
        self._cursor.execute(
            "CREATE TABLE IF NOT EXISTS bare_lock (name text PRIMARY KEY, owner text, expires timestamptz) "
            "WITH (fillfactor = 50)"
        )
        self._cursor.execute("SELECT pg_advisory_unlock(1)")

    def acquire(self, key: str) -> object:
        return self._cursor.execute(
            f"INSERT INTO bare_lock AS l VALUES (%s, %s, now() + interval '{TTL} s') ON CONFLICT (name) DO UPDATE "
            "SET owner = excluded.owner, expires = excluded.expires WHERE l.expires <= now()",
            (key, self._owner),
        ).rowcount

    def release(self, key: str) -> object:
        return self._cursor.execute(
            "UPDATE bare_lock SET expires = '-infinity' WHERE name = %s AND owner = %s", (key, self._owner)
        ).rowcount

    def is_held(self, key: str) -> bool:
        sql = "SELECT 1 FROM bare_lock WHERE name = %s AND expires > now()"
        return self._cursor.execute(sql, (key,)).fetchone() is not None


class BareAdvisory(_Psycopg):
    """``pg_try_advisory_lock`` and ``pg_advisory_unlock``."""

    def acquire(self, key: str) -> object:
        return self._cursor.execute("SELECT pg_try_advisory_lock(%s)", (_number(key),)).fetchone()[0]

    def release(self, key: str) -> object:
        return self._cursor.execute("SELECT pg_advisory_unlock(%s)", (_number(key),)).fetchone()[0]

    def is_held(self, key: str) -> bool:
        sql = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND granted"
        return self._cursor.execute(sql, (_number(key),)).fetchone() is not None


def _number(key: str) -> int:
    return sum(key.encode())


class BareRedis(Bare):
    """``SET NX PX`` and ``DEL`` on one socket."""

    def __init__(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", settings.REDIS_PORT))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _ask(self, *words: bytes) -> bytes:
        self._socket.send(b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]))
        return self._socket.recv(1000)

    def acquire(self, key: str) -> object:
        return self._ask(b"SET", key.encode(), b"me", b"NX", b"PX", b"%d" % (TTL * 1000)) == b"+OK\r\n"

    def release(self, key: str) -> object:
        return self._ask(b"DEL", key.encode()) == b":1\r\n"

    def is_held(self, key: str) -> bool:
        return self._ask(b"EXISTS", key.encode()) == b":1\r\n"
