"""What the tests of the lock table on PostgreSQL share."""

import itertools

import pytest

from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.backends.table.postgres import PostgresTableLockBackend
from tests.support.pg_helpers import (
    within,
)

NAME = "angee:name:table"
_owners = map("owner{}".format, itertools.count())


@pytest.fixture(params=["postgres", "pgbouncer"])
def backend(request, postgres, in_production):
    if request.param == "pgbouncer":
        request.getfixturevalue("pgbouncer")
    yield from _backend(request.param, postgres)


@pytest.fixture
def direct(postgres, in_production):
    yield from _backend("postgres", postgres)


def _backend(alias, postgres):
    postgres.query("TRUNCATE angee_jobs_tasklock, angee_jobs_lockmember")
    backend = TableLockBackend(alias=alias)
    assert isinstance(backend, PostgresTableLockBackend)
    yield backend
    backend.stop_watching()
    backend.close()


def acquire(backend, name=NAME, ttl=30.0, owner=None, seconds=5.0):
    owner = owner or next(_owners)
    return owner, backend.acquire(name, owner, ttl, "{}", within(seconds))


def rows(postgres, columns="*"):
    return postgres.query(f"SELECT {columns} FROM angee_jobs_tasklock ORDER BY name")
