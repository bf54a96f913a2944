"""What is only convenience at PostgreSQL never fails an acquire, a release or a renewal.

A notification that cannot be queued took the whole release with it: another session had listened and then kept a
transaction open, the queue was full, and a lock stayed taken until its lease was over.
"""

import contextlib
import itertools
import tempfile
from pathlib import Path

import pytest

from angee_jobs.locks import LockBackendError
from angee_jobs.locks.backends.advisory import sql as advisory_sql
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.postgres.statements import Statement
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.backends.table import postgres_sql as table_sql
from tests.conftest import TEST_DIR, migrate
from tests.support.pg_helpers import alias_with, in_production, within
from tests.support.servers import PostgresServer, free_port, require

__all__ = ["in_production"]

NAME = "angee:name:notify"
_owners = map("owner{}".format, itertools.count())

pytestmark = pytest.mark.usefixtures("needs_postgres", "in_production")


@pytest.fixture
def needs_postgres():
    require(PostgresServer.unavailable())


@pytest.fixture(params=[TableLockBackend, PostgresAdvisoryLockBackend])
def backend_class(request):
    return request.param


@contextlib.contextmanager
def made(backend_class, alias):
    """Two backends, as two processes would have them."""
    backends = backend_class(alias=alias), backend_class(alias=alias)
    try:
        yield backends
    finally:
        for backend in backends:
            backend.stop_watching()
            pool = backend._session.pool if backend_class is PostgresAdvisoryLockBackend else backend._pool
            for slot in pool.slots:
                slot.drop()


@pytest.fixture(scope="module")
def full(databases):
    """The alias of a server whose queue of notifications is full, and stays so."""
    require(PostgresServer.unavailable())

    import psycopg

    directory = Path(tempfile.mkdtemp(prefix="s-", dir=TEST_DIR))
    directory.chmod(0o711)
    options = {"fsync": "off", "max_notify_queue_pages": 64}
    with PostgresServer(directory, port=free_port(), options=options) as server:
        with alias_with("full", HOST=str(directory), PORT=str(server.port)) as alias:
            migrate(alias)
            with server.connect() as listener, server.connect() as speaker:
                listener.execute("LISTEN anything")
                listener.execute("BEGIN; SELECT 1")
                with pytest.raises(psycopg.Error, match="queue"):
                    for number in range(10000):
                        speaker.execute("SELECT pg_notify('anything', %s)", [f"{number}" + "x" * 7000])
                server.alias = alias
                yield server


def acquire(backend):
    owner = next(_owners)
    return owner, backend.acquire(NAME, owner, 30.0, "{}", within())


@pytest.mark.parametrize("published", [False, True])
def test_a_full_queue_of_notifications_keeps_no_lock(full, backend_class, published, monkeypatch):
    with made(backend_class, full.alias) as (backend, other):
        for _ in range(3):
            owner, grant = acquire(backend)
            assert grant
            if published:
                monkeypatch.setattr(advisory_sql, "PUBLISH_SECONDS", 0)
            assert list(backend.extend([Extension(NAME, owner, 30)], within())) == [owner]
            other.remaining(NAME, within())  # leaves word that it waits, so that the release is to tell it
            assert backend.release(NAME, owner, within()) is True
            assert backend.release(NAME, owner, within()) is False
            owner, grant = acquire(other)
            assert grant
            assert other.release(NAME, owner, within()) is True


def test_a_full_queue_of_notifications_does_not_keep_a_release_by_force(full):
    with made(TableLockBackend, full.alias) as (backend, other):
        owner, grant = acquire(backend)
        other.remaining(NAME, within())
        assert other.force_release(NAME, within()).fencing_token == grant.fencing_token
        assert backend.release(NAME, owner, within()) is False
        assert acquire(other)[1]


@pytest.mark.parametrize("kind", ["~1", "~shared"])
def test_a_full_queue_of_notifications_keeps_no_place(full, kind):
    with made(TableLockBackend, full.alias) as (backend, other):
        for end in (
            lambda owner: backend.release(NAME, owner, within()),
            lambda _: other.force_release(NAME, within()),
        ):
            owner = next(_owners) + kind
            other.force_release(NAME, within())  # what an earlier test has left
            assert backend.acquire(NAME, owner, 30.0, "{}", within())
            assert other.remaining(NAME, within()) is not None
            assert end(owner)
            assert acquire(other)[1]


def test_a_release_that_was_not_answered_in_time_counts_although_its_notification_failed(full):
    """Its answer, read later, is an error: but the lock had been unlocked before that."""
    with made(PostgresAdvisoryLockBackend, full.alias) as (backend, other):
        owner, _ = acquire(backend)
        other.remaining(NAME, within())
        with full.hanging(), pytest.raises(LockBackendError):
            backend.release(NAME, owner, within(0.2))
        assert backend.release(NAME, owner, within()) is True
        assert acquire(other)[1]


@pytest.mark.parametrize("module", [table_sql, advisory_sql])
def test_a_mark_that_is_refused_does_not_end_a_wait(postgres, monkeypatch, module):
    refused = "SELECT $1::text, $2::text, 1/0" if module is table_sql else "SELECT $1::bigint / 0"
    monkeypatch.setattr(module, "MARK", Statement(refused))
    backend_class = TableLockBackend if module is table_sql else PostgresAdvisoryLockBackend
    with made(backend_class, "postgres") as (backend, other):
        owner, _ = acquire(backend)
        other.remaining(NAME, within())
        assert acquire(other)[1] is None
        assert backend.release(NAME, owner, within())
        assert acquire(other)[1]
        other.force_release(NAME, within())


def test_a_session_that_may_not_listen_carries_locks(postgres, monkeypatch):
    """As behind a pooler that refuses LISTEN: nothing is heard of those who want a hold by force."""
    monkeypatch.setattr(advisory_sql, "ask_channel", lambda pid: "1 is no channel")
    with made(PostgresAdvisoryLockBackend, "postgres") as (backend, other):
        owner, grant = acquire(backend)
        assert grant
        assert acquire(other)[1] is None
        assert backend.release(NAME, owner, within())
