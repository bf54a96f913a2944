"""What the torture run (`python -m tests.torture`) has found, each as a test of its own."""

import pytest
from django.db import OperationalError, connections, transaction

from angee_jobs.locks import lock
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.advisory.sql import advisory_key, ask_channel
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.postgres.session import wait_for
from angee_jobs.locks.backends.table import TableLockBackend
from tests.support.pg_helpers import in_production, within
from tests.support.servers import eventually

__all__ = ["in_production"]

NAME = "angee:name:torture"


def ask(postgres, session, token=""):
    """What a process says that wants the lock by force."""
    sql = "SELECT pg_notify(%s, %s || extract(epoch FROM clock_timestamp()))"
    postgres.query(sql, [ask_channel(session.server_pid), f"{advisory_key(NAME)}:{token}:"])
    eventually(lambda: wait_for(session._pgconn.socket, 0))


@pytest.fixture
def sessions(postgres, in_production):
    """Two backends, each as a process of its own would have it."""
    backends = [PostgresAdvisoryLockBackend(alias="postgres") for _ in range(2)]
    yield backends
    for each in backends:
        each._session.pool.slots[0].drop()


@pytest.mark.once
def test_a_crash_of_the_server_does_not_take_an_extension_back(postgres, in_production):
    """The holder was told that it has ten minutes: so it has, although the server crashed right after it said so."""
    postgres.query("TRUNCATE angee_jobs_tasklock")
    backend = TableLockBackend(alias="postgres")
    assert backend.acquire(NAME, "owner", 5.0, "{}", within())
    assert backend.extend([Extension(NAME, "owner", 600.0)], within()) == ["owner"]
    postgres.kill()
    postgres.start()
    record = backend.inspect(NAME, within())
    assert record is not None
    assert record.expires_in > 500
    backend.release(NAME, "owner", within())
    backend.close()


@pytest.mark.once
@pytest.mark.parametrize("backend", ["postgres_table", "postgres_advisory"])
def test_a_crash_of_the_server_takes_no_token_back_that_another_session_had_made_ready(
    postgres, in_production, backend
):
    """A sequence logs values ahead. Whoever draws one of those does not wait until the log is on the disk."""
    mine = lock("torture-token", ttl=2, backend=backend)
    assert mine.acquire()
    assert mine.release()
    drawn = "SELECT nextval('angee_jobs_fencing_token')"
    stranger = postgres.connect(autocommit=False)  # who never commits, and so never waits for the disk
    logged = "SELECT log_cnt FROM angee_jobs_fencing_token"
    while stranger.execute(drawn).fetchone() and stranger.execute(logged).fetchone() != (32,):
        pass
    assert mine.acquire()
    before = mine.fencing_token
    postgres.kill()
    stranger.close()
    postgres.start()
    again = lock("torture-token", ttl=30, backend=backend)
    assert again.acquire(timeout=20)  # a lease has survived the crash
    assert again.fencing_token > before
    again.release()


@pytest.mark.once
@pytest.mark.parametrize("backend", ["postgres_table", "redis"])
def test_a_guard_on_a_connection_that_is_gone_raises_an_error_of_django(postgres, valkey, backend):
    """And not one of the driver, which nobody who uses Django would catch."""
    with lock("torture-guard", backend=backend) as held:
        with pytest.raises(OperationalError):
            with transaction.atomic(using="postgres"):
                connections["postgres"].ensure_connection()
                postgres.terminate(connections["postgres"].connection.info.backend_pid)
                with held.guard(using="postgres"):
                    raise AssertionError("nothing can be guarded here")
    connections["postgres"].close_if_unusable_or_obsolete()
    with lock("torture-guard", backend=backend) as held:
        with transaction.atomic(using="postgres"), held.guard(using="postgres"):
            pass


@pytest.mark.once
def test_a_hold_that_was_given_up_by_force_is_lost_though_the_server_hung_meanwhile(postgres, sessions):
    """What the server had done to free it was taken for the holder's own release, which so learned nothing."""
    backend, other = sessions
    grant = backend.acquire(NAME, "owner", 5.0, "{}", within())
    ask(postgres, backend._session.pool.slots[0].session)
    with postgres.hanging():
        backend.extend([], within(0.3))  # hears of it, and gets no answer
    eventually(lambda: other.acquire(NAME, "next", 5.0, "{}", within()))
    assert backend.release(NAME, "owner", within()) is False
    assert other.release(NAME, "next", within()) is True
    again = backend.acquire(NAME, "again", 5.0, "{}", within())
    assert again.fencing_token > grant.fencing_token
    assert backend.release(NAME, "again", within()) is True
    assert postgres.advisory_locks() == 0


@pytest.mark.once
def test_a_request_by_force_that_is_heard_late_does_not_end_the_next_hold(postgres, sessions):
    """Who asks does not know the token of a hold that is younger than a second."""
    backend, other = sessions
    assert backend.acquire(NAME, "first", 5.0, "{}", within())
    session = backend._session.pool.slots[0].session
    ask(postgres, session)
    assert backend.release(NAME, "first", within()) is True
    assert backend.acquire(NAME, "second", 5.0, "{}", within())
    backend.extend([], within(0.3))  # hears of it
    assert other.acquire(NAME, "third", 5.0, "{}", within()) is None
    assert backend.release(NAME, "second", within()) is True


@pytest.mark.once
@pytest.mark.parametrize(
    "payload", ["", "x", "1", "1:2", ":::", "1:x:3", "1::x", "1::nan", "1::1e9", "9" * 7000, "1:2:3:4"]
)
def test_anybody_may_say_anything_where_holds_are_asked_for(postgres, sessions, payload):
    backend, _ = sessions
    assert backend.acquire(NAME, "owner", 5.0, "{}", within())
    session = backend._session.pool.slots[0].session
    postgres.query("SELECT pg_notify(%s, %s)", [ask_channel(session.server_pid), payload])
    eventually(lambda: wait_for(session._pgconn.socket, 0))
    backend.extend([], within(0.3))
    assert backend.release(NAME, "owner", within()) is True
