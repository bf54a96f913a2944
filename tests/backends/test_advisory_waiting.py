"""Waiting for session locks: who is told, and what a wait leaves."""

import math
import threading
import time

from angee_jobs.locks.backends.advisory import session as pg_holds
from angee_jobs.locks.backends.advisory import sql as pg_advisory
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.advisory.sql import advisory_key, marker_key
from tests.support.advisory import NAME, _nothing_left, acquire, alias, backend, direct, other, watch
from tests.support.pg_helpers import (
    in_production,
    within,
)
from tests.support.servers import eventually

__all__ = ["_nothing_left", "alias", "backend", "direct", "in_production", "other"]


def test_only_those_who_wait_are_told(direct, postgres):
    with postgres.connect() as ear, postgres.connect() as waiter:
        ear.execute(f"LISTEN {pg_advisory.CHANNEL}")
        waited = "angee:name:waited"
        waiter.execute("SELECT pg_advisory_lock_shared(%s)", [marker_key(waited)])
        for name in (NAME, waited):
            owner, _ = acquire(direct, name)
            direct.release(name, owner, within())
        # They are heard in the order in which they were sent.
        assert [n.payload for n in ear.notifies(timeout=10, stop_after=1)] == [str(advisory_key(waited))]


def test_a_waiter_is_woken(backend, other, postgres):
    for _ in range(10):
        owner, grant = acquire(backend)
        assert grant
        assert other.remaining(NAME, within()) is None
        other.wait_for_change(0.01)  # connects
        assert acquire(other)[1] is None
        release = threading.Timer(0.1, backend.release, [NAME, owner, within()])
        release.start()
        started = time.monotonic()
        assert list(other.wait_for_change(5.0)) == [NAME]
        assert time.monotonic() - started < 3
        release.join()
        mine, grant = acquire(other)
        assert grant
        assert other.release(NAME, mine, within())
    assert backend.remaining("angee:name:free", within()) is None
    owner, _ = acquire(backend, "angee:name:mine")
    assert backend.remaining("angee:name:mine", within()) == math.inf
    other.stop_watching()
    backend.stop_watching()
    backend.release("angee:name:mine", owner, within())
    assert watch(other) == set()
    assert watch(backend) == set()
    eventually(lambda: postgres.advisory_locks() == 0, 5, "the marks are gone too")


def test_the_mark_of_a_key_that_nobody_waits_for_goes(backend, other, postgres):
    owner, _ = acquire(backend)
    acquire(other, "angee:name:kept")
    for name in (NAME, "angee:name:second"):
        other.remaining(name, within())
    assert postgres.advisory_locks() == 4
    session, asked = other._session._marks[marker_key("angee:name:second")]
    other._session._marks[marker_key("angee:name:second")] = session, asked - pg_holds.MARK_SECONDS
    other.remaining(NAME, within())
    assert postgres.advisory_locks() == 3
    backend.release(NAME, owner, within())


def test_waiting_keeps_no_snapshot_and_writes_no_log(direct, postgres, in_production):
    [other] = [PostgresAdvisoryLockBackend(alias="postgres")]
    owner, _ = acquire(direct)
    size = postgres.log_size()
    stop = threading.Event()

    def wait():
        while not stop.is_set():
            other.remaining(NAME, within())
            acquire(other)
            other.wait_for_change(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        with postgres.connect() as holder:
            holder.execute("SET statement_timeout = '20s'")
            holder.execute("CREATE INDEX CONCURRENTLY advisory_test ON angee_jobs_tasklock (name)")
            holder.execute("DROP INDEX CONCURRENTLY advisory_test")
    finally:
        stop.set()
        thread.join(10)
        other.stop_watching()
        other._session.pool.slots[0].drop()
    assert direct.release(NAME, owner, within())
    # What is done now and then is the server's own, and a client that is gone is one of an earlier test.
    others = ("checkpoint", "autovacuum", "automatic", "could not send data to client", "connection to client lost")
    log = [line for line in postgres.log(size).splitlines() if not any(each in line for each in others)]
    assert log == []
