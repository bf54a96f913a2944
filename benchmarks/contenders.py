"""Whose locks are measured: ours, those of others, and the bare statements of a driver.

Each contender lives in worker processes of its own (see ``worker.py``), where it is made. A contender says how its
users write a block, and how they take and give back without one; the loops that are timed are the same for all, but
for the bare statements, which are not slowed down by a context manager.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

TTL = 30


class Void(AssertionError):
    """A lock did not exclude, or was not free when it had to be: what was measured meanwhile means nothing."""


def ensure(truth: object, what: str) -> None:
    if not truth:
        raise Void(what)


class Contender:
    """One kind of lock on one storage."""

    #: What a block's ``__enter__`` may give for "refused" instead of raising one of these.
    refusals: tuple[type[BaseException], ...] = ()
    #: Whether ``__enter__`` gives a bool that must be looked at.
    tells = False

    def block(self, key: str, timeout: float | None = None) -> Callable[[], AbstractContextManager[Any]]:
        """What makes the context manager of a block, with renewal on where there is any."""
        raise NotImplementedError

    def take(self, key: str) -> Callable[[], object] | None:
        """Acquire without a block and without renewal; what releases (true if it did), or None if refused."""
        raise NotImplementedError

    def is_held(self, key: str) -> bool:
        raise NotImplementedError

    def of_thread(self) -> Contender:
        """What one of several threads uses."""
        return self

    # The loops.

    def blocks(self, key: str, times: int) -> None:
        """Enter and leave so many blocks."""
        make = self.block(key)
        if self.tells:
            for _ in range(times):
                with make() as acquired:
                    if not acquired:
                        raise Void(f"refused {key} that nobody holds")
            return
        for _ in range(times):
            with make():
                pass

    def pairs(self, key: str, times: int) -> None:
        """Acquire and release so many times."""
        take = self.take
        for _ in range(times):
            give = take(key)
            if give is None or not give():
                raise Void(f"refused {key} that nobody holds, or lost it")

    def refused(self, key: str, times: int) -> None:
        """Be refused so many times."""
        take = self.take
        for _ in range(times):
            if take(key) is not None:
                raise Void(f"took {key} that somebody else holds")

    def asked(self, key: str, times: int) -> None:
        """Ask so many times whether somebody holds it, which is so."""
        is_held = self.is_held
        for _ in range(times):
            if not is_held(key):
                raise Void(f"{key} is held, and the answer was that it is not")


class Ours(Contender):
    """angee_jobs on one of its backends."""

    def __init__(self, alias: str) -> None:
        import django

        django.setup()
        from angee_jobs.locks import LockNotAcquiredError, lock, task_lock_is_held

        self.alias = alias
        self._lock = lock
        self._is_held = task_lock_is_held
        self.refusals = (LockNotAcquiredError,)

    def block(self, key: str, timeout: float | None = None, ttl: float = TTL) -> Any:
        return functools.partial(self._lock, key, backend=self.alias, timeout=timeout, ttl=ttl)

    def take(self, key: str) -> Callable[[], object] | None:
        mine = self._lock(key, backend=self.alias)
        return mine.release if mine.acquire() else None

    def is_held(self, key: str) -> bool:
        return self._is_held(key, backend=self.alias)


class Thieves(Contender):
    """Not a lock: it grants to everybody. For the tests of the benchmark itself."""

    def block(self, key: str, timeout: float | None = None) -> Any:
        import contextlib

        return contextlib.nullcontext

    def take(self, key: str) -> Callable[[], object] | None:
        return lambda: True

    def is_held(self, key: str) -> bool:
        return False


def _peer(name: str, *args: Any) -> Any:
    def make() -> Contender:
        from benchmarks import peers

        return getattr(peers, name)(*args)

    return make


def _bare(name: str) -> Any:
    def make() -> Contender:
        from benchmarks import bare

        return getattr(bare, name)()

    return make


#: By storage and name: what makes the contender in its worker.
CONTENDERS: dict[str, Callable[[], Contender]] = {
    "process/angee_jobs": functools.partial(Ours, "default"),
    "sqlite/angee_jobs": functools.partial(Ours, "sqlite"),
    "sqlite/flexiq": _peer("Flexiq", "sqlite"),
    "sqlite/bare": _bare("BareSqlite"),
    "postgres/angee_jobs": functools.partial(Ours, "postgres"),
    "postgres/flexiq": _peer("Flexiq", "postgres"),
    "postgres/bare": _bare("BarePostgres"),
    "advisory/angee_jobs": functools.partial(Ours, "advisory"),
    "advisory/django-pglock": _peer("Pglock"),
    "advisory/bare": _bare("BareAdvisory"),
    "redis/angee_jobs": functools.partial(Ours, "redis"),
    "redis/redis-py": _peer("RedisPy"),
    "redis/python-redis-lock": _peer("PythonRedisLock"),
    "redis/flexiq": _peer("Flexiq", "redis"),
    "redis/bare": _bare("BareRedis"),
    "test/thieves": Thieves,
}
STORAGES = ("process", "sqlite", "postgres", "advisory", "redis")


def of_storage(storage: str) -> list[str]:
    return [name for name in CONTENDERS if name.startswith(f"{storage}/")]
