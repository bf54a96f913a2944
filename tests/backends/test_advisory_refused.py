"""Sessions on which nothing can be locked, or no token drawn."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.errors import LockBackendError
from tests.support.advisory import _backend, _nothing_left, acquire, believed, locks
from tests.support.pg_helpers import (
    alias_with,
    database_defaults,
    in_production,
)

__all__ = ["_nothing_left", "in_production"]


def test_a_read_only_session_keeps_no_lock(postgres, pgbouncer_session, in_production):
    pooled = {"HOST": str(pgbouncer_session.directory), "PORT": str(pgbouncer_session.port)}
    with database_defaults(postgres, default_transaction_read_only="on"), alias_with(**pooled) as alias:
        pgbouncer_session.restart()
        for backend in _backend(alias):
            for _ in range(3):
                with pytest.raises(LockBackendError, match="read-only") as caught:
                    acquire(backend)
                assert not caught.value.uncertain
                assert locks(postgres) == believed(backend) == []
    pgbouncer_session.restart()


def test_without_the_sequence_no_lock_stays(postgres, in_production):
    postgres.query("CREATE DATABASE bare", dbname="postgres")
    with alias_with(NAME="bare") as alias:
        for backend in _backend(alias):
            with pytest.raises(LockBackendError, match=f"manage.py migrate angee_jobs --database {alias}"):
                acquire(backend)
            assert locks(postgres) == believed(backend) == []
    postgres.query("DROP DATABASE bare", dbname="postgres")


def test_a_sequence_that_may_not_be_used_leaves_no_lock(postgres, in_production):
    postgres.query("DROP ROLE IF EXISTS weak")
    postgres.query("CREATE ROLE weak LOGIN")
    with alias_with(USER="weak") as alias:
        for backend in _backend(alias):
            for _ in range(3):
                with pytest.raises(LockBackendError, match="permission denied"):
                    acquire(backend)
                assert locks(postgres) == believed(backend) == []


def test_another_engine_is_refused():
    with pytest.raises(ImproperlyConfigured, match=r"works on PostgreSQL.*sqlite"):
        PostgresAdvisoryLockBackend(alias="default")
    with pytest.raises(ImproperlyConfigured, match="no database 'nowhere'"):
        PostgresAdvisoryLockBackend(alias="nowhere")


def test_transaction_pooling_is_proven_and_refused(postgres, pgbouncer, in_production):
    for options in (
        {},
        {"server_round_robin": 1, "min_pool_size": 5},
        {"server_round_robin": 1, "min_pool_size": 2},
        {"default_pool_size": 1},
    ):
        pgbouncer.options |= options
        pgbouncer.prepare()
        pgbouncer.restart()
        for backend in _backend("pgbouncer"):
            for _ in range(3):
                with pytest.raises(LockBackendError, match=r"connects directly or through.*TableLockBackend"):
                    acquire(backend)
                assert locks(postgres) == []
        for name in options:
            del pgbouncer.options[name]
    pgbouncer.options["default_pool_size"] = 10
    pgbouncer.restart()
