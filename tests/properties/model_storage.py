"""What the model-based tests do to each backend's storage, besides what the contract suite does."""

from __future__ import annotations

from typing import Any

from angee_jobs.locks import LockKey, clock, lock_backends
from angee_jobs.locks.backends.advisory.sql import UNLOCK, advisory_key
from angee_jobs.locks.testing import Strategy
from tests.backends.test_advisory_contract import Advisory
from tests.backends.test_redis_contract import Redis
from tests.support.strategies import Local, PostgresTable, SqliteTable


class Storage:
    """One backend; ``strategy`` is that of its contract suite."""

    strategy: Strategy
    leases = True

    @property
    def alias(self) -> str:
        return self.strategy.alias

    @property
    def database(self) -> str:
        """Where the callers' own transactions run."""
        return self.strategy.databases[0]

    @property
    def backend(self) -> Any:
        return lock_backends.operations(self.alias)

    def has(self, capability: str) -> bool:
        return capability not in self.strategy.lacks

    def expire(self, key: LockKey) -> None:
        """Let the lease be over, by the storage's clock."""
        raise NotImplementedError


class LocalStorage(Storage):
    strategy = Local()

    def expire(self, key: LockKey) -> None:
        self.backend._leases[key.name][0].expires = clock.now() - 1


class SqliteStorage(Storage):
    strategy = SqliteTable()

    def expire(self, key: LockKey) -> None:
        with self.strategy.connect() as connection:
            sql = "UPDATE lock SET expires = 1 WHERE name = ? AND owner <> ''"
            assert connection.execute(sql, [key.name]).rowcount == 1


class PostgresStorage(Storage):
    strategy = PostgresTable()

    def expire(self, key: LockKey) -> None:
        sql = "UPDATE angee_jobs_tasklock SET expires_at = clock_timestamp() - interval '1 s' WHERE name = %s"
        assert self.strategy.server is not None
        self.strategy.server.query(sql, [key.name])


class _Sessions(Advisory):
    def delete_hold(self, key: LockKey) -> None:
        """On the holder's own session, as nobody else can unlock it."""
        session: Any = lock_backends.operations(self.alias)._session  # type: ignore[attr-defined]
        deadline = clock.now() + 5

        def unlock(on: Any) -> None:
            assert on.execute(UNLOCK, [advisory_key(key.name)], deadline) == [(b"t",)]
            session.sweep(on, deadline)  # as the next look at the session does, if there is doubt

        session.run(deadline, unlock)


class AdvisoryStorage(Storage):
    strategy = _Sessions()
    leases = False


class RedisStorage(Storage):
    def __init__(self) -> None:
        self.strategy = Redis("redis")

    def expire(self, key: LockKey) -> None:
        with self.strategy.client() as client:
            seconds, micros = client.time()
            over = int(seconds) * 1_000_000 + int(micros) - 1_000_000
            stored = f"{self.backend.prefix}hold:{key.name}"
            client.set(stored, b"%016d%b" % (over, client.get(stored)[16:]))
            client.zadd(f"{self.backend.prefix}index", {key.name: over})
