"""Session locks under deadlines of a millisecond and exceptions of signal handlers."""

import contextlib
import time

from angee_jobs.locks.backends.advisory import sql as pg_advisory
from angee_jobs.locks.backends.advisory.sql import advisory_key, halves
from angee_jobs.locks.backends.postgres.statements import Statement
from angee_jobs.locks.errors import LockBackendError
from tests.support.advisory import (
    NAME,
    _nothing_left,
    acquire,
    alias,
    backend,
    believed,
    locks,
    session_of,
    watch,
)
from tests.support.pg_helpers import (
    Interrupt,
    give_up,
    in_production,
    in_threads,
    interrupted_after,
    within,
)

__all__ = ["_nothing_left", "alias", "backend", "in_production"]


def test_thousands_of_deadlines_of_a_millisecond(backend, postgres):
    kept, _ = acquire(backend, "angee:name:kept")
    late = 0
    for number in range(2000):
        name, owner = f"angee:name:{number % 7}", f"short-{number}"
        certain = number % 50 == 0  # late on however fast a machine
        try:
            with postgres.hanging() if certain else contextlib.nullcontext():
                backend.acquire(name, owner, 30, "{}", within(0.001 * (number % 4) / 3))
        except LockBackendError:
            late += 1
        give_up(backend, name, owner)
        if number % 100 == 0:
            assert locks(postgres) == believed(backend) == [halves(advisory_key("angee:name:kept"))]
    assert late >= 40
    assert locks(postgres) == believed(backend) == [halves(advisory_key("angee:name:kept"))]
    assert watch(backend, ("angee:name:kept", kept)) == {kept}


def test_hundreds_of_interrupts(backend, postgres):
    kept, _ = acquire(backend, "angee:name:kept")
    struck = 0
    for number in range(500):
        owner = f"struck-{number}"
        try:
            with interrupted_after(0.0001 + 0.00001 * (number % 120)):
                while True:
                    acquire(backend, owner=owner)
                    backend.release(NAME, owner, within())
        except Interrupt:
            struck += 1
        give_up(backend, NAME, owner)
        if number % 25 == 0:
            assert watch(backend, ("angee:name:kept", kept)) == {kept}
            assert locks(postgres) == believed(backend) == [halves(advisory_key("angee:name:kept"))]
    assert struck == 500
    watch(backend)
    assert locks(postgres) == believed(backend) == [halves(advisory_key("angee:name:kept"))]
    assert acquire(backend)[1]


def test_a_signal_handler_may_use_locks_itself(backend, postgres):
    used = 0

    def handler():
        nonlocal used
        owner, grant = acquire(backend, "angee:name:handler")
        assert grant
        assert backend.release("angee:name:handler", owner, within())
        assert acquire(backend, NAME)[1] is None or backend.force_release(NAME, within())
        used += 1

    for number in range(100):
        with interrupted_after(0.0002 + 0.00001 * number, handler):
            for _ in range(1000):  # until it strikes
                owner, grant = acquire(backend, "angee:name:outer")
                assert grant
                assert backend.release("angee:name:outer", owner, within())
                if used > number:
                    break
    assert used == 100
    assert locks(postgres) == believed(backend) == []


def test_strays_are_freed_and_missing_ones_told(backend, postgres):
    """Whatever brought them about."""
    owner, _ = acquire(backend)
    session = session_of(backend)
    session.execute(Statement("SELECT pg_advisory_lock(12345)"), [], within())
    session.execute(pg_advisory.UNLOCK, [advisory_key(NAME)], within())
    backend._session.doubtful = True
    assert watch(backend, (NAME, owner)) == set()
    assert locks(postgres) == []


def test_many_threads_share_the_session(backend, postgres):
    counts = [0] * 5

    def work(number):
        for _ in range(30):
            name = f"angee:name:{number % 5}"
            owner, grant = acquire(backend, name)
            if grant:
                before = counts[number % 5]
                time.sleep(0)
                counts[number % 5] = before + 1
                assert backend.release(name, owner, within())

    in_threads(20, work)
    assert locks(postgres) == believed(backend) == []
