"""The locks of others, each used as its documentation says, and set up as fast as it allows."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import settings
from benchmarks.contenders import TTL, Contender


class Flexiq(Contender):
    """flexiq's lock, whose storage is written in Rust. It polls every 100 ms, its default."""

    def __init__(self, storage: str) -> None:
        from flexiq import Queue
        from flexiq.locks import LockNotAcquiredError

        if storage == "sqlite":
            self._queue = Queue(db_path=str(settings.DIR / "flexiq.db"))
        elif storage == "postgres":
            url = f"postgresql://postgres@/angee_tests?host={settings.POSTGRES_DIR}&port={settings.POSTGRES_PORT}"
            self._queue = Queue(backend="postgres", db_url=url)
        else:
            self._queue = Queue(backend="redis", db_url=settings.REDIS_URL)
        self.refusals = (LockNotAcquiredError,)

    def block(self, key: str, timeout: float | None = None, ttl: float = TTL) -> Any:
        return functools.partial(self._queue.lock, key, timeout=timeout, ttl=ttl)

    def take(self, key: str) -> Callable[[], object] | None:
        mine = self._queue.lock(key, auto_extend=False)
        return mine.release if mine.acquire() else None

    def is_held(self, key: str) -> bool:
        return self._queue.lock(key).info() is not None


class Pglock(Contender):
    """django-pglock, on Django's own connection."""

    tells = True

    def __init__(self) -> None:
        import django

        django.setup()
        import pglock

        self._advisory = pglock.advisory

    def block(self, key: str, timeout: float | None = None, ttl: float = TTL) -> Any:
        return functools.partial(self._advisory, key, using="postgres", timeout=timeout or 0)

    def take(self, key: str) -> Callable[[], object] | None:
        mine = self._advisory(key, using="postgres", timeout=0)

        def give() -> bool:  # its release says nothing
            mine.release()
            return True

        return give if mine.acquire() else None


class RedisPy(Contender):
    """The lock that comes with redis-py. It renews nothing, and polls every 100 ms, its default."""

    def __init__(self) -> None:
        import redis

        self._client = redis.Redis.from_url(settings.REDIS_URL)
        self.refusals = (redis.exceptions.LockError,)

    def block(self, key: str, timeout: float | None = None, ttl: float = TTL) -> Any:
        return functools.partial(
            self._client.lock, key, timeout=ttl, blocking=timeout is not None, blocking_timeout=timeout
        )

    def take(self, key: str) -> Callable[[], object] | None:
        mine = self._client.lock(key, timeout=TTL, blocking=False)

        def give() -> bool:  # raises if it was lost
            mine.release()
            return True

        return give if mine.acquire() else None

    def is_held(self, key: str) -> bool:
        return bool(self._client.lock(key).locked())


class PythonRedisLock(Contender):
    """python-redis-lock: one renewal thread per lock; waiters are woken by a list."""

    def __init__(self) -> None:
        import redis
        import redis_lock

        logging.getLogger("redis_lock").setLevel(logging.ERROR)  # it warns of each refusal
        self._client = redis.Redis.from_url(settings.REDIS_URL)
        self._lock = redis_lock.Lock
        self.refusals = (redis_lock.NotAcquired,)

    def block(self, key: str, timeout: float | None = None, ttl: float = TTL) -> Any:
        make = functools.partial(self._lock, self._client, key, expire=ttl, auto_renewal=True)
        if timeout is None:
            return make  # waits without a limit: nobody enters one that is refused in these measurements

        @contextlib.contextmanager
        def block() -> Iterator[None]:
            mine = make()
            if not mine.acquire(timeout=timeout):
                raise self.refusals[0]
            try:
                yield
            finally:
                mine.release()

        return block

    def take(self, key: str) -> Callable[[], object] | None:
        mine = self._lock(self._client, key, expire=TTL)

        def give() -> bool:  # raises if it was lost
            mine.release()
            return True

        return give if mine.acquire(blocking=False) else None

    def is_held(self, key: str) -> bool:
        return bool(self._lock(self._client, key, expire=TTL).locked())
