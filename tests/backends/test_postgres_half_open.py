"""Connections that are open and swallow everything, as behind a load balancer that forgot them; new ones work."""

import contextlib
import threading
import time

import pytest
from django.conf import settings
from django.test import override_settings

from angee_jobs.locks import Lock, LockBackendError, clock, lock, lock_backends, task_lock_is_held
from angee_jobs.locks.backends.advisory import sql as advisory_sql
from angee_jobs.locks.backends.postgres import pool as pg_pool
from angee_jobs.locks.backends.postgres.pool import Pool
from tests.support.middlebox import Middlebox
from tests.support.pg_helpers import ECHO, SLEEP, alias_with, in_production, within
from tests.support.servers import eventually

__all__ = ["in_production"]


@pytest.fixture
def middlebox(postgres, in_production):
    """In front of the database alias "behind"; "behind_table" and "behind_advisory" are the locks on it."""
    backends = {
        f"behind_{name}": {"BACKEND": f"angee_jobs.locks.{cls}", "OPTIONS": {"alias": "behind"}}
        for name, cls in (("table", "TableLockBackend"), ("advisory", "PostgresAdvisoryLockBackend"))
    }
    with Middlebox(f"{postgres.directory}/.s.PGSQL.{postgres.port}") as box:
        with (
            alias_with("behind", HOST="127.0.0.1", PORT=str(box.port)),
            override_settings(ANGEE_JOBS_LOCKS=settings.ANGEE_JOBS_LOCKS | backends),
        ):
            yield box
            for name in backends:
                lock_backends.operations(name).stop_watching()
                lock_backends.operations(name).close()


def name():
    return f"half-open {time.monotonic_ns()}"


@pytest.mark.parametrize("backend", ["behind_table", "behind_advisory"])
def test_locks_can_be_had_again_at_once(middlebox, backend):
    with lock(name(), backend=backend):
        pass
    middlebox.forget()
    with pytest.raises(LockBackendError):
        Lock(name(), backend=backend).acquire(timeout=1)
    started = clock.now()
    while clock.now() - started < 20:
        tried = clock.now()
        try:
            with lock(name(), backend=backend, timeout=1):
                break
        except LockBackendError:
            assert clock.now() - tried < 2.5
    assert clock.now() - started < 4
    for _ in range(3):
        with lock(name(), backend=backend, timeout=1):
            pass


@pytest.mark.parametrize("backend", ["behind_table", "behind_advisory"])
def test_many_threads_whose_sessions_are_all_forgotten(middlebox, backend):
    barrier = threading.Barrier(6)
    results, failures = [], []

    def work():
        barrier.wait(20)
        if backend == "behind_table":
            lock_backends.operations(backend)._pool.run(SLEEP, [0.3], within())
        barrier.wait(20)
        barrier.wait(20)
        limit = clock.now() + 20
        while clock.now() < limit:
            try:
                with lock(name(), backend=backend, timeout=1):
                    results.append(clock.now())
                    return
            except LockBackendError as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    barrier.wait(20)
    with lock(name(), backend=backend):
        pass
    barrier.wait(20)
    middlebox.forget()
    started = clock.now()
    barrier.wait(20)
    for thread in threads:
        thread.join(30)
    assert len(results) == 5, failures[-5:]
    assert max(results) - started < 8


def test_a_session_lock_is_told_as_lost_and_comes_free(middlebox, postgres):
    key = name()
    held = Lock(key, backend="behind_advisory")
    assert held.acquire()
    middlebox.forget()
    with pytest.raises(LockBackendError):
        Lock(name(), backend="behind_advisory").acquire(timeout=0.5)
    eventually(lambda: held.lost, 6)
    assert not held.held
    with lock(key, backend="behind_advisory", timeout=2):
        pass
    assert not task_lock_is_held(key, backend="postgres_advisory")


def test_a_lease_survives(middlebox):
    with lock(name(), ttl=3, backend="behind_table") as held:
        middlebox.forget()
        time.sleep(5)
        assert not held.lost
        held.check()


def test_a_session_that_is_only_slow_keeps_its_holds(middlebox, postgres, monkeypatch):
    """The server is asked what the session does: it is at work."""
    monkeypatch.setattr(advisory_sql, "SILENT_SECONDS", 0.1)
    session = lock_backends.operations("behind_advisory")._session
    with lock(name(), backend="behind_advisory") as held:
        before = session.pool.slots[0].session
        with pytest.raises(LockBackendError):
            session.run(within(0.2), lambda on: on.execute(SLEEP, [2.0], within(0.2)))
        with pytest.raises(LockBackendError):
            Lock(name(), backend="behind_advisory").acquire(timeout=0.5)
        with lock(name(), backend="behind_advisory", timeout=5):
            pass
        assert session.pool.slots[0].session is before
        assert not held.lost


def test_where_new_connections_are_silent_too_nothing_is_lost(middlebox, postgres, monkeypatch):
    monkeypatch.setattr(advisory_sql, "SILENT_SECONDS", 0.1)
    session = lock_backends.operations("behind_advisory")._session
    with lock(name(), backend="behind_advisory") as held:
        with postgres.hanging():
            for _ in range(3):
                with pytest.raises(LockBackendError):
                    Lock(name(), backend="behind_advisory").acquire(timeout=0.5)
        with lock(name(), backend="behind_advisory", timeout=5):
            pass
        assert not held.lost
        assert session.pool.slots[0].session is not None


def test_what_is_never_answered_is_given_up(middlebox, monkeypatch):
    """A release waits for a late grant, but not for ever."""
    pool = Pool("behind", 1)
    for _ in range(2):
        pool.run(ECHO, ["x"], within())  # and is prepared now
    middlebox.forget()
    with pytest.raises(LockBackendError):
        pool.run(ECHO, ["x"], within(0.1), owner="late")
    with pytest.raises(LockBackendError, match="still not answered"):
        pool.drain("late", within(0.1))
    monkeypatch.setattr(pg_pool, "SILENT_SECONDS", 0)
    with pytest.raises(LockBackendError, match="still not answered"):
        pool.drain("late", within(0.1))  # perhaps the server answers nobody
    pool.run(ECHO, ["x"], within())
    pool.drain("late", within(0.1))
    assert len([slot for slot in pool.slots if slot.session]) == 1
    pool.close()


def test_a_pool_makes_no_end_of_connections(middlebox):
    pool = Pool("behind", 2)
    for _ in range(6):
        with contextlib.suppress(LockBackendError):
            pool.run(ECHO, ["x"], within(0.3))
        middlebox.forget()
        with pytest.raises(LockBackendError):
            pool.run(ECHO, ["x"], within(0.1))
    assert middlebox.made == 4
    for slot in pool.slots:
        slot.drop()
