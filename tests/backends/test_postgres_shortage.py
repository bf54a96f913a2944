"""Running out of connections, descriptors or threads costs those who wait, and not those who hold."""

import threading
import time

import pytest
from django.conf import settings
from django.test import override_settings

from angee_jobs.locks import LockBackendError, lock, lock_backends
from tests.support.pg_helpers import ECHO, WAIT, alias_with, held_up, in_production, in_threads, pool, within
from tests.support.procs import Child
from tests.support.servers import eventually

__all__ = ["in_production", "pool"]


@pytest.fixture(params=["TableLockBackend", "PostgresAdvisoryLockBackend"])
def limited(request, postgres, in_production):
    """Sets the number of connections that the server grants to the locks."""
    postgres.query("DROP OWNED BY limited" if has_role(postgres) else "SELECT 1")
    postgres.query("DROP ROLE IF EXISTS limited")
    postgres.query("CREATE ROLE limited LOGIN")
    postgres.query("GRANT ALL ON ALL TABLES IN SCHEMA public TO limited")
    postgres.query("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO limited")
    backend = {"BACKEND": f"angee_jobs.locks.{request.param}", "OPTIONS": {"alias": "limited"}}
    with (
        alias_with("limited", USER="limited"),
        override_settings(ANGEE_JOBS_LOCKS=settings.ANGEE_JOBS_LOCKS | {"limited": backend}),
    ):
        yield lambda number: postgres.query(f"ALTER ROLE limited CONNECTION LIMIT {number}")
        lock_backends.operations("limited").close()
        lock_backends.operations("limited").stop_watching()


def has_role(postgres):
    return postgres.query("SELECT 1 FROM pg_roles WHERE rolname = 'limited'")


def test_no_connection_to_be_had_costs_no_lease(limited):
    with lock("kept", ttl=1.5, backend="limited") as held:
        limited(1)
        refusals = []

        def wait():
            try:
                refusals.append(lock("kept", backend="limited").acquire(timeout=0.7))
            except LockBackendError as error:
                refusals.append(error)

        waiters = [threading.Thread(target=wait) for _ in range(2)]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join(20)
        time.sleep(2.5)
        assert not held.lost
        assert refusals == [False, False]


def test_threads_wait_for_the_one_session(limited):
    limited(1)

    def work(number):
        with lock(f"free {number}", timeout=5, backend="limited"):
            time.sleep(0.05)
        return True

    assert in_threads(6, work) == [True] * 6


def test_without_any_connection_there_is_an_error_at_once(limited):
    limited(0)
    started = time.monotonic()
    with pytest.raises(LockBackendError, match=r"cannot be connected to.*limited"):
        lock("free", timeout=5, backend="limited").acquire()
    assert time.monotonic() - started < 3
    limited(1)
    with lock("free", timeout=5, backend="limited"):
        pass


def test_a_session_whose_answer_was_late_is_used_again(pool, postgres):
    """It stays busy after a wait's last request; a new one is not always to be had."""
    pool.run(ECHO, ["x"], within())
    pid = pool.slots[0].session.server_pid
    with held_up(postgres), pytest.raises(LockBackendError):
        pool.run(WAIT, [], within(0.1))
    eventually(lambda: pool.slots[0].session.look() and pool.slots[0].answered(), 10)
    assert int(pool.run(ECHO, ["x"], within())[0][1]) == pid
    assert [slot.session is not None for slot in pool.slots] == [True, False, False, False]


def test_a_late_answer_is_waited_for_where_no_connection_is_to_be_had(pool, postgres, monkeypatch):
    pool.run(ECHO, ["x"], within())
    pid = pool.slots[0].session.server_pid
    pool.extra = {"port": "1"}
    monkeypatch.setattr(pool, "forced", {"port": "1"})
    with held_up(postgres):
        with pytest.raises(LockBackendError):
            pool.run(WAIT, [], within(0.1))
        with pytest.raises(LockBackendError, match="cannot be connected to"):
            pool.run(ECHO, ["x"], within(0.3))
    assert int(pool.run(ECHO, ["x"], within())[0][1]) == pid


@pytest.mark.parametrize("backend", ["postgres_table", "postgres_advisory"])
def test_no_descriptors(postgres, backend):
    with Child("pg_shortage", "descriptors", backend) as child:
        lost, kept, *free = child.expect("lost", 40).split()
        assert lost == "0"
        assert kept in ("False", "LockBackendError")
        assert free == ["True", "True"]
        assert child.wait() == 0


@pytest.mark.parametrize("backend", ["postgres_table", "postgres_advisory"])
@pytest.mark.parametrize("connected", [True, False])
def test_the_lock_is_released_at_the_interpreters_end(postgres, backend, connected):
    """Where no more threads can be started, from Python 3.12 on."""
    before = {session.pid for session in postgres.sessions()}
    with Child("pg_shortage", "end", backend) as child:
        child.expect("held")
        time.sleep(0.5)  # in which idle sessions are closed
        ours = [session.pid for session in postgres.sessions() if session.pid not in before]
        assert ours
        if not connected:
            for pid in ours:
                postgres.terminate(pid)
        child.send("end")
        assert child.wait() == 0
        assert "Traceback" not in child.stderr()
    assert lock("kept", ttl=1, backend=backend).acquire(timeout=2)
