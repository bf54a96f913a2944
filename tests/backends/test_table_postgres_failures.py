"""The lock table on a PostgreSQL that hangs, dies, or cannot be used."""

import time

import pytest

from angee_jobs.locks import clock
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.backends.table import postgres as table_postgres
from angee_jobs.locks.errors import LockBackendError
from tests.support.pg_helpers import (
    Interrupt,
    alias_with,
    give_up,
    in_production,
    in_threads,
    interrupted_after,
    within,
)
from tests.support.pg_table import NAME, acquire, backend, direct, rows
from tests.support.servers import eventually

__all__ = ["backend", "direct", "in_production"]


def test_a_grant_that_came_too_late_is_given_up(backend, postgres):
    uncertain = 0
    for _ in range(15):
        with postgres.hanging():
            started = time.monotonic()
            with pytest.raises(LockBackendError) as caught:
                acquire(backend, owner="late", seconds=0.1)
            assert time.monotonic() - started < 2
            with pytest.raises(LockBackendError):
                backend.release(NAME, "late", within(0.1))
        give_up(backend, NAME, "late")
        assert backend.inspect(NAME, within()) is None
        time.sleep(0.02)
        assert backend.inspect(NAME, within()) is None
        uncertain += caught.value.uncertain
    assert uncertain


def test_deadlines_of_one_millisecond_leave_nothing(backend, postgres):
    granted = 0
    for number in range(1000):
        owner = f"short-{number}"
        try:
            granted += backend.acquire(NAME, owner, 30, "{}", within(0.001 * (number % 3))) is not None
        except LockBackendError:
            pass
        give_up(backend, NAME, owner)
    assert backend.inspect(NAME, within()) is None
    assert rows(postgres, "owner") in ([("",)], [])
    assert acquire(backend)[1]


@pytest.mark.parametrize("kind", ["", "~1", "~shared"])
def test_interrupts_in_mid_query_leave_nothing(kind, backend, postgres):
    """As Celery's soft time limit does."""
    interrupts = 0
    for number in range(400):
        owner = f"struck{number}{kind}"
        try:
            with interrupted_after(0.0001 + 0.00001 * (number % 150)):
                for _ in range(100):
                    acquire(backend, owner=owner)
                    backend.release(NAME, owner, within())
        except Interrupt:
            interrupts += 1
        give_up(backend, NAME, owner)
    assert interrupts > 100
    assert backend.inspect(NAME, within()) is None
    assert not [slot for slot in backend._pool.slots if slot.claimed]
    assert len(backend._pool.slots) <= 2 * table_postgres.SESSIONS


def test_a_signal_handler_may_use_locks_itself(backend):
    used = 0

    def handler():
        nonlocal used
        owner, grant = acquire(backend, "angee:name:handler")
        assert grant and backend.release("angee:name:handler", owner, within())
        used += 1

    for number in range(150):
        with interrupted_after(0.0002 + 0.00001 * (number % 100), handler):
            for _ in range(1000):  # until it strikes
                owner, grant = acquire(backend)
                assert grant and backend.release(NAME, owner, within())
                if used > number:
                    break
    assert used == 150
    assert not [slot for slot in backend._pool.slots if slot.claimed]


def test_sessions_that_died_while_idle_are_replaced(backend, postgres):
    owner, _ = acquire(backend)
    for how in (postgres.terminate_all, postgres.restart):
        how()
        assert backend.extend([Extension(NAME, owner, 30)], within()) == [owner]
    postgres.terminate_all()
    assert backend.release(NAME, owner, within())


def test_many_threads_use_a_few_sessions(direct, postgres):
    others = len(postgres.sessions())

    def work(number):
        for _ in range(20):
            owner, grant = acquire(direct, f"angee:name:{number}", seconds=20)
            assert grant and direct.release(f"angee:name:{number}", owner, within(20))

    in_threads(30, work)
    assert len(postgres.sessions()) <= others + table_postgres.SESSIONS


def test_no_server(postgres, in_production):
    with alias_with(PORT="1") as alias, pytest.raises(LockBackendError, match="cannot be connected to") as caught:
        acquire(TableLockBackend(alias=alias))
    assert not caught.value.uncertain


def test_without_the_migration_the_error_says_what_to_run(postgres, in_production):
    postgres.query("CREATE DATABASE bare", dbname="postgres")
    with alias_with(NAME="bare") as alias:
        backend = TableLockBackend(alias=alias)
        for operation in (lambda: acquire(backend), lambda: backend.inspect(NAME, within())):
            with pytest.raises(LockBackendError, match=f"manage.py migrate angee_jobs --database {alias}") as caught:
                operation()
            assert not caught.value.uncertain
        backend.close()
        postgres.query("DROP DATABASE bare", dbname="postgres")


def test_the_clock_of_the_server_decides(backend):
    started = clock.now()
    acquire(backend, ttl=0.3)
    eventually(lambda: acquire(backend)[1], timeout=5)
    assert clock.now() - started > 0.29
