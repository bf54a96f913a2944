"""Which keys are waited for: none is kept for ever, and none is lost because another wait ends.

Both PostgreSQL backends kept every key that was ever contended, for as long as any thread waited for any lock.
"""

import threading

import pytest

from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.postgres import waited as pg_waited
from angee_jobs.locks.backends.postgres.waited import Waited
from angee_jobs.locks.backends.table import TableLockBackend
from tests.support.pg_helpers import in_production, in_threads, within
from tests.support.servers import eventually

__all__ = ["in_production"]

NAME = "angee:name:waited"


@pytest.fixture(params=["table", "table through a pooler", "advisory"])
def backends(request, postgres, in_production):
    """Two, as two processes would have them."""
    alias = "postgres"
    if request.param == "table through a pooler":
        request.getfixturevalue("pgbouncer")
        alias = "pgbouncer"
    backend_class = PostgresAdvisoryLockBackend if request.param == "advisory" else TableLockBackend
    made = backend_class(alias=alias), backend_class(alias=alias)
    postgres.query("TRUNCATE angee_jobs_tasklock")
    yield made
    for backend in made:
        backend.stop_watching()
        for slot in (backend._session.pool if backend_class is PostgresAdvisoryLockBackend else backend._pool).slots:
            slot.drop()


def test_keys_that_nobody_waits_for_are_forgotten_while_others_wait(backends, monkeypatch):
    backend, _ = backends
    now = within(0)
    monkeypatch.setattr(pg_waited.clock, "now", lambda: now)
    for number in range(200):
        backend.remaining(f"angee:name:waited-{number}", now + 1000)
        if number % 10 == 0:
            now += 1
            backend.remaining(NAME, now + 1000)
    assert len(backend._waited._keys) < 10 * 3 * pg_waited.WAITED_SECONDS
    assert NAME in backend._waited.recent().values()


def test_the_end_of_all_waits_takes_no_new_waiter_along(backends):
    """It was decided just before this one came."""
    backend, other = backends
    for _ in range(3):
        assert other.acquire(NAME, "owner", 30.0, "{}", within())
        backend.remaining(NAME, within())
        backend.wait_for_change(0.01)  # connects
        backend.remaining(NAME, within())
        backend.stop_watching()
        later = threading.Timer(0.1, other.release, [NAME, "owner", within()])
        later.start()

        def told(backend=backend):
            heard = backend.wait_for_change(1.0)
            return heard is None or NAME in heard

        assert eventually(told)
        later.join(10)
        eventually(lambda: other.inspect(NAME, within()) is None)


def test_threads_that_wait_while_the_keys_are_looked_up():
    waited, stop = Waited(), threading.Event()

    def work(number):
        try:
            for turn in range(3000):
                if number % 2:
                    waited._next_look = 0.0
                    waited.add(f"{number}-{turn % 50}", "name")
                else:
                    waited.names([f"1-{turn % 50}", "unknown"])
                    waited.recent()
        finally:
            stop.set()

    in_threads(6, work)
    assert stop.is_set()
    assert len(waited._keys) == 150
    assert waited.names(["1-1", "unknown"]) == ["name"]
