"""What the tests of coroutines share."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from angee_jobs.locks import Lock, clock, lock, lock_backends
from angee_jobs.locks.renewal import renewer
from angee_jobs.locks.testing import ContractCase
from angee_jobs.locks.waiting import waiters_of
from tests.support.servers import eventually

DEADLINE = 45.0  # seconds for anything that has to come to an end


def run(main: Coroutine[Any, Any, Any], *, debug: bool = False) -> Any:
    """Run `main` in a new loop, to its end or to the deadline."""

    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE):
            return await main

    return asyncio.run(bounded(), debug=debug)


def new_key() -> str:
    return f"aio-{secrets.token_hex(6)}"


async def until(predicate: Callable[[], Any], within: float = 10.0, what: str = "") -> Any:
    """As `eventually`, without blocking the loop."""
    deadline = clock.now() + within
    while not (answer := predicate()):
        if clock.now() >= deadline:
            raise AssertionError(f"not within {within:g} s: {what or predicate}")
        await asyncio.sleep(0.002)
    return answer


def waiters(key: str, alias: str) -> int:
    """How many callers of this process wait for the lock of a plain key."""
    return waiting_here(lock(key).name, alias)


def waiting_here(name: str, alias: str) -> int:
    """How many callers of this process wait for the lock of that name."""
    queue = waiters_of(lock_backends.operations(alias)).queues.get(name)
    return len(queue.wakers) if queue is not None else 0


def is_free(key: str, alias: str) -> bool:
    """By a try, which is the only answer that counts."""
    probe = lock(key, backend=alias, ttl=5)
    return probe.acquire() and probe.release()


def renewed(held: Lock) -> None:
    """Wait until the lease is renewed once more; a session lock has none, so it is kept for as long."""
    if held.expires_at is None:
        time.sleep(1)
    else:
        ContractCase.is_renewed(held)


def nothing_left(key: str, alias: str, within: float = 10.0) -> None:
    """The lock is free, nobody stands in line for it, and no hold of it is renewed."""
    name = lock(key).name
    eventually(lambda: is_free(key, alias), within, f"{name} comes free")
    assert waiters(key, alias) == 0
    assert not [hold for hold in list(renewer.holds) if hold.name == name]


def lock_threads() -> list[str]:
    """The threads of this process that its locks started."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("angee-locks")]


def make(key: str, alias: str, **options: Any) -> Lock:
    return lock(key, backend=alias, **({"ttl": 20} | options))
