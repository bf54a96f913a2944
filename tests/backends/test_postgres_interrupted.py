"""Signal handlers at every instruction of the operations on PostgreSQL: what they raise, and locks that they want."""

import signal
import threading
import time

import pytest

from angee_jobs.locks import Lock, clock, lock_backends
from tests.support.instructions import at_instruction
from tests.support.pg_helpers import Interrupt, give_up, in_production, within

__all__ = ["in_production"]

BACKENDS = ["postgres_advisory", "postgres_table"]
CODE = ("backends/postgres/", "backends/advisory/", "backends/table/")
#: Every so many-th instruction is struck, each time others. With 1, all of them.
STEP = 17


def raise_interrupt():
    raise Interrupt


@pytest.mark.parametrize("fresh", [False, True], ids=["session", "no session"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_at_any_instruction_leaves_nothing(postgres, in_production, backend, fresh):
    operations = lock_backends.operations(backend)
    name = f"angee:name:struck {time.monotonic_ns()}"
    number, rounds = time.monotonic_ns() % STEP, 0
    while True:
        owner = f"struck-{number}"
        if fresh:
            operations.close()
        finished = False
        try:
            with at_instruction(number, raise_interrupt, *CODE) as counter:
                assert operations.acquire(name, owner, 30.0, "", within()) is not None
                operations.extend([], within())
                operations.inspect(name, within())
                operations.release(name, owner, within())
                finished = not counter.struck
        except Interrupt:
            pass
        give_up(operations, name, owner)
        rounds += 1
        # Another process gets it; this one is not left with a session that is busy or that nobody may use.
        assert operations.acquire(name, "next", 30.0, "", within()) is not None, number
        assert operations.release(name, "next", within()), number
        pool = operations._pool if backend == "postgres_table" else operations._session.pool
        assert not any(slot.claimed for slot in pool.slots), number
        if finished:
            break
        number += STEP * (4 if fresh else 1)
    assert rounds > 10
    operations.close()
    assert postgres.advisory_locks() == 0


def test_a_handler_wants_the_lock_that_its_thread_is_asking_for(postgres, in_production):
    """While the thread waits for the session, another thread has it."""
    operations = lock_backends.operations("postgres_advisory")
    go_on, claimed = threading.Event(), threading.Event()
    answers = []

    def keep(session):
        claimed.set()
        go_on.wait(20)

    def handler(signum, frame):
        started = clock.now()
        answers.append((Lock("wanted", backend="postgres_advisory").acquire(), clock.now() - started))
        go_on.set()

    other = threading.Thread(target=operations._session.run, args=[within(30), keep])
    other.start()
    assert claimed.wait(20)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        mine = Lock("wanted", backend="postgres_advisory")
        assert mine.acquire()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        go_on.set()
        other.join(20)
    [(acquired, seconds)] = answers
    assert acquired is False
    assert seconds < 2
    assert mine.release()


def test_a_handler_wants_it_at_any_instruction(postgres, in_production):
    operations = lock_backends.operations("postgres_advisory")
    name = f"angee:name:wanted {time.monotonic_ns()}"
    number, outcomes = time.monotonic_ns() % STEP, set()
    while True:
        inner = []

        def handler(inner=inner, number=number):
            started = clock.now()
            inner.append(operations.acquire(name, f"inner-{number}", 30.0, "", within()))
            assert clock.now() - started < 2

        with at_instruction(number, handler, *CODE) as counter:
            outer = operations.acquire(name, f"outer-{number}", 30.0, "", within())
        assert not (outer and inner and inner[0]), number
        outcomes.add((bool(outer), bool(inner and inner[0])))
        for owner, grant in ((f"outer-{number}", outer), (f"inner-{number}", inner[0] if inner else None)):
            assert operations.release(name, owner, within()) is (grant is not None), number
        if not counter.struck:
            break
        number += STEP
    assert outcomes == {(True, False), (False, True)}
    operations.close()
    assert postgres.advisory_locks() == 0
