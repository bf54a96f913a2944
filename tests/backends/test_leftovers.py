"""Scenario 30: after all of it, nothing is left at the server. And scenario 38 with a clock that is really wrong."""

import threading
import time
import unittest
from unittest import mock

import pytest

from angee_jobs.locks import LockBackendError, LockKey, lock, lock_backends, task_lock_is_held
from angee_jobs.locks.clock import now
from angee_jobs.locks.testing import ContractCase, Peer
from angee_jobs.locks.testing.contract import tasks
from angee_jobs.locks.testing.contract.exclusion import Clock
from angee_jobs.locks.testing.contract.peers import end_idle_peers
from tests.support.procs import faketime
from tests.support.servers import eventually
from tests.support.strategies import PostgresTable, SqliteTable

ALIAS = "postgres_table"


@pytest.fixture(autouse=True)
def nothing_of_earlier_tests(request):
    """Idle peers keep sessions for their next lock, and a test may have left some whose answer nobody waited for."""
    end_idle_peers()
    if "postgres" in request.fixturenames:
        postgres = request.getfixturevalue("postgres")
        postgres.query("TRUNCATE angee_jobs_tasklock")
        for session in of_the_locks(postgres):
            postgres.terminate(session.pid)
        eventually(lambda: of_the_locks(postgres) == [])


def of_the_locks(postgres):
    return [session for session in postgres.sessions() if session.application_name.startswith("angee_jobs")]


def nothing_left(postgres, sessions=0):
    """No session of ours that is at work or in a transaction, no advisory lock, no hold; so many idle sessions."""

    def look():
        left = of_the_locks(postgres)
        idle = len(left) <= sessions and all(session.state == "idle" for session in left)
        return idle and postgres.advisory_locks() == 0

    eventually(look, 10, what=f"no advisory lock, at most {sessions} idle sessions: {of_the_locks(postgres)}")
    [(holds,)] = postgres.query("SELECT count(*) FROM angee_jobs_tasklock WHERE owner <> '' AND expires_at > now()")
    assert holds == 0


def test_s30_a_process_that_did_everything_leaves_nothing(postgres):
    key, other = (LockKey("leftovers", (name, str(time.monotonic_ns()))) for name in ("a", "b"))
    options = {"backend": ALIAS}
    peer = Peer()
    try:
        peer.call(tasks.enter, "a", key, ttl=2.25, **options)
        assert lock(key, **options).acquire() is False
        time.sleep(2.4)  # renewed
        assert of_the_locks(postgres), "the sessions are not told by their name"
        peer.call(tasks.leave, "a")
        peer.call(tasks.storm, key, 100, ttl=10, within=50, **options)
        peer.call(tasks.acquire_and_release, other, 20, **options)
        with lock(key, timeout=10, **options):  # what the last strike abandoned is released in the background
            peer.call(tasks.strike_when_waiting, key, ALIAS)
            with pytest.raises(tasks.Struck):
                peer.call(tasks.acquire, "b", key, 10, **options)
            assert peer.call(tasks.acquire, "c", key, 1.5, **options) is False
        eventually(lambda: not task_lock_is_held(key, **options))
        nothing_left(postgres, sessions=8)  # it may keep a few connections for the next lock
        assert peer.exit() == 0
    finally:
        peer.end()
    nothing_left(postgres)


def test_s30_a_process_that_was_killed_leaves_nothing(postgres):
    key = LockKey("leftovers", ("killed", str(time.monotonic_ns())))
    peer, waiting = Peer(), Peer()
    try:
        peer.call(tasks.enter, "a", key, ttl=1.5, backend=ALIAS)
        waiting.begin(tasks.acquire, "b", key, 20, ttl=1.5, backend=ALIAS)
        time.sleep(0.3)
        waiting.kill()
        peer.kill()
        eventually(lambda: not task_lock_is_held(key, backend=ALIAS))
    finally:
        peer.end()
        waiting.end()
    nothing_left(postgres)


def test_s39_in_a_test_run_no_session_is_left_when_nothing_is_held(postgres):
    """It would keep the test database from being dropped."""
    key = f"leftovers-{time.monotonic_ns()}"
    with lock(key, backend=ALIAS):
        assert lock(key, backend=ALIAS).acquire(timeout=1.5) is False
    eventually(lambda: of_the_locks(postgres) == [], 10)


@pytest.mark.parametrize(
    ("alias", "table"),
    [("postgres_table", "angee_jobs_tasklock"), ("postgres_advisory", "angee_jobs_sessionhold")],
    ids=["table", "advisory"],
)
def test_s39_in_a_test_run_no_session_is_left_by_a_question_without_an_answer(postgres, alias, table):
    with postgres.connect() as stranger, stranger.transaction():
        stranger.execute(f"LOCK TABLE {table}")
        with pytest.raises(LockBackendError, match="did not answer"):
            lock_backends.operations(alias).inspect("angee:name:leftovers", now() + 0.5)
    eventually(lambda: of_the_locks(postgres) == [], 10)


def test_s39_in_a_test_run_two_threads_that_are_through_at_once_leave_no_session(postgres):
    """One has the session, and has just found that it is needed, when the other gives up the last hold on it."""
    session = lock_backends.operations("postgres_advisory")._session
    pool, needed, forget = session.pool, session.pool.in_use, session.forget
    looked, gone = threading.Event(), threading.Event()

    def in_use():
        answer = needed()
        if threading.current_thread() is first and not looked.is_set():
            looked.set()
            gone.wait(20)
        return answer

    def forget_meanwhile(entry):
        first.start()
        assert looked.wait(20)
        forget(entry)
        gone.set()

    first = threading.Thread(target=pool.used)
    held = lock("leftovers", backend="postgres_advisory")
    assert held.acquire()
    with mock.patch.object(pool, "in_use", in_use), mock.patch.object(session, "forget", forget_meanwhile):
        assert held.release()
        first.join(20)
    eventually(lambda: of_the_locks(postgres) == [], 10)


class FakedClock(ContractCase):
    """libfaketime turns the clock of the whole process, also for what is not Python."""

    def test_s38_a_faked_system_clock_makes_no_difference(self):
        environments = [faketime(3600), faketime(-3600)]
        if None in environments:
            self.skipTest("needs the package faketime of the system")
        peers = [self.new_peer(environment) for environment in environments]
        assert peers[0].call(tasks.read_clock) - peers[1].call(tasks.read_clock) > 7000
        keys = [self.new_key(), self.new_key()]
        # SQLite has no server: the clock of its tokens is that of the process.
        Clock.clocks_make_no_difference(self, peers, keys, tokens="push" not in self.strategy.lacks)


class TestFakedClockPostgres(FakedClock, unittest.TestCase):
    strategy = PostgresTable()

    @pytest.fixture(autouse=True)
    def _server(self, postgres):
        self.strategy.server = postgres


class TestFakedClockSqlite(FakedClock, unittest.TestCase):
    strategy = SqliteTable()
