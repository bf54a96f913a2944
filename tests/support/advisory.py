"""What the tests of the session locks share."""

import itertools

import pytest

from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.advisory.sql import halves
from angee_jobs.locks.backends.base import Extension
from tests.support.pg_helpers import (
    alias_with,
    within,
)
from tests.support.servers import eventually

NAME = "angee:name:advisory"
_owners = map("owner-{}".format, itertools.count())


@pytest.fixture(params=["direct", "session pooling"])
def alias(request, postgres):
    if request.param == "direct":
        yield "postgres"
    else:
        server = request.getfixturevalue("pgbouncer_session")
        with alias_with(HOST=str(server.directory), PORT=str(server.port)) as alias:
            yield alias


@pytest.fixture
def backend(alias, in_production):
    yield from _backend(alias)


@pytest.fixture
def other(alias, in_production):
    """As another process would have it: with a session of its own."""
    yield from _backend(alias)


@pytest.fixture
def direct(postgres, in_production):
    yield from _backend("postgres")


def _backend(alias):
    backend = PostgresAdvisoryLockBackend(alias=alias)
    yield backend
    backend.stop_watching()
    backend._session.pool.slots[0].drop()


@pytest.fixture(autouse=True)
def _nothing_left(postgres):
    postgres.query("TRUNCATE angee_jobs_sessionhold")
    yield
    postgres.heal()
    eventually(lambda: postgres.advisory_locks() == 0)


def acquire(backend, name=NAME, owner=None, seconds=5.0):
    owner = owner or next(_owners)
    return owner, backend.acquire(name, owner, 30.0, '{"host": "h", "pid": 1}', within(seconds))


def watch(backend, *holds):
    """What the renewal thread does every second; the owners of the holds that are alive."""
    return set(backend.extend([Extension(name, owner, 30) for name, owner in holds], within()))


def locks(postgres):
    """The keys that are held on the server, in our space."""
    sql = "SELECT classid::bigint, objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
    return sorted(postgres.query(sql))


def session_of(backend):
    return backend._session.pool.slots[0].session


def wait_for_the_end_of_sessions(*backends):
    """Those that the server has ended: a pooler passes that on in its own time."""
    for session in map(session_of, backends):
        eventually(lambda session=session: session is None or not session.look(), 10)


def believed(backend):
    return sorted(halves(entry.key) for entry in backend._session.entries.values())


def in_background(backend, stop):
    """The renewal thread of the other process."""
    while not stop.wait(0.1):
        watch(backend)
