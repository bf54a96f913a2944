"""A process's few sessions with PostgreSQL: who gets one, what is sent twice, when they are closed."""

import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from angee_jobs.locks import clock, force_release, lock
from angee_jobs.locks.backends.postgres import pool as pg_pool
from angee_jobs.locks.backends.postgres.pool import Pool
from angee_jobs.locks.backends.postgres.slots import Claim
from angee_jobs.locks.backends.postgres.statements import Statement
from angee_jobs.locks.errors import LockBackendError
from tests.support.pg_helpers import (
    ECHO,
    SLEEP,
    WAIT,
    ended_in_mid_query,
    held_up,
    in_production,
    in_threads,
    pool,
    within,
)
from tests.support.servers import eventually

__all__ = ["in_production", "pool"]


def test_a_claim_is_void_when_its_frame_is_gone(pool):
    slot = pool.slots[0]

    def forget():
        assert Claim(pool, slot).take()

    for _ in range(3):
        forget()
        assert not slot.claimed
        assert pool.claim(within()).slot is slot


def test_only_what_may_be_is_sent_twice(pool, postgres):
    for again in (True, False):
        pool.run(ECHO, ["x"], within())
        pid = pool.slots[0].session.server_pid
        with held_up(postgres) as stranger:
            thread = ended_in_mid_query(postgres, pid, stranger)
            if again:
                assert pool.run(WAIT, [], within(20), again=True)[0][1] == b"waited"
            else:
                with pytest.raises(LockBackendError) as caught:
                    pool.run(WAIT, [], within(20))
                assert caught.value.uncertain
                assert caught.value.__cause__ is not None
            thread.join(10)


def test_what_was_prepared_may_get_lost(pool):
    for _ in range(3):
        pool.run(ECHO, ["x"], within())
    pool.run(Statement("DEALLOCATE ALL"), [], within())
    assert pool.run(ECHO, ["y"], within())[0][0] == b"y"


def test_idle_sessions_are_closed(postgres, pool, monkeypatch):
    monkeypatch.setattr(pg_pool, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(pg_pool, "_janitor", pg_pool._Janitor())
    seen = threading.Event()  # before which the janitor does not begin
    sleep = time.sleep
    monkeypatch.setattr(pg_pool, "time", types.SimpleNamespace(sleep=lambda seconds: seen.wait(30) and sleep(seconds)))
    others = {each.pid for each in postgres.sessions()}
    in_threads(4, lambda number: pool.run(SLEEP, [0.1], within()))
    ours = {each.pid for each in postgres.sessions()} - others
    assert ours
    seen.set()
    eventually(lambda: not ours & {each.pid for each in postgres.sessions()}, 10)
    assert pool.run(ECHO, ["again"], within())


def test_in_a_test_run_sessions_are_closed_at_once(postgres):
    pool = Pool("postgres", 4)
    others = {each.pid for each in postgres.sessions()}
    in_threads(8, lambda number: pool.run(SLEEP, [0.05], within()))
    assert not any(slot.session for slot in pool.slots)
    eventually(lambda: {each.pid for each in postgres.sessions()} <= others, 10)


@pytest.mark.parametrize("backend", ["postgres_advisory", "postgres_table"])
def test_threads_that_ask_again_and_again_starve_no_other(postgres, in_production, backend):
    """They were back at the session before anybody woke up, and the others heard of a server that does not answer."""
    stop, rounds = threading.Event(), [0] * 3

    def hammer(number):
        while not stop.is_set():
            force_release("hammered", backend=backend)
            rounds[number] += 1

    with ThreadPoolExecutor(3) as elsewhere:
        hammers = [elsewhere.submit(hammer, number) for number in range(3)]
        try:
            delays = []
            for _ in range(100):
                started = clock.now()
                with lock("mine", backend=backend):
                    delays.append(clock.now() - started)
            eventually(lambda: all(rounds), 10)
        finally:
            stop.set()
        for each in hammers:
            each.result(20)
    assert max(delays) < 2.5


def test_a_pool_that_is_used_up_answers_in_time(pool, postgres):
    with held_up(postgres):
        threads = [threading.Thread(target=pool.run, args=[WAIT, [], within(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: all(slot.claimed for slot in pool.slots), 10)
        started = clock.now()
        with pytest.raises(LockBackendError) as caught:
            pool.run(ECHO, ["x"], within(0.2))
        assert clock.now() - started < 2.2
        assert not caught.value.uncertain
    for thread in threads:
        thread.join(20)


def test_a_release_waits_for_what_is_outstanding(pool, postgres):
    pool.run(ECHO, ["x"], within())  # connects
    with ThreadPoolExecutor(1) as elsewhere:
        with held_up(postgres):
            with pytest.raises(LockBackendError):
                pool.run(WAIT, [], within(0.1), owner="late")
            with pytest.raises(LockBackendError):
                pool.drain("late", within(0.05))
            pool.drain("another", within(0.05))
            drained = elsewhere.submit(pool.drain, "late", within(20))
            time.sleep(0.1)
            assert not drained.done()
        drained.result(20)
    assert not any(slot.session and slot.session.busy for slot in pool.slots)
