"""`manage.py check --database` of the PostgreSQL backends."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.table import TableLockBackend
from tests.support.pg_helpers import alias_with


def test_all_is_well(postgres, pgbouncer, pgbouncer_session):
    pooled = {"HOST": str(pgbouncer_session.directory), "PORT": str(pgbouncer_session.port)}
    with alias_with(**pooled) as alias:
        for backend in (
            PostgresAdvisoryLockBackend(alias="postgres"),
            PostgresAdvisoryLockBackend(alias=alias),
            TableLockBackend(alias="postgres"),
            TableLockBackend(alias="pgbouncer"),
        ):
            assert backend.check_database([backend.db_alias]) == []


def test_transaction_pooling(postgres, pgbouncer):
    backend = PostgresAdvisoryLockBackend(alias="pgbouncer")
    [error] = backend.check_database(["pgbouncer"])
    assert (error.id, error.is_serious()) == ("angee_jobs.E003", True)
    assert "PostgresAdvisoryLockBackend" in error.hint
    assert "TableLockBackend" in error.hint
    assert backend.check_database(["default"]) == []


@pytest.mark.parametrize("backend_class", [PostgresAdvisoryLockBackend, TableLockBackend])
def test_a_missing_migration_is_a_warning(postgres, backend_class):
    """An error would stop the migration itself."""
    postgres.query("CREATE DATABASE bare", dbname="postgres")
    with alias_with(NAME="bare") as alias:
        [warning] = backend_class(alias=alias).check_database([alias])
        assert warning.id == "angee_jobs.W001"
        assert not warning.is_serious()
        assert f"manage.py migrate angee_jobs --database {alias}" in warning.hint
    postgres.query("DROP DATABASE bare", dbname="postgres")


def test_a_server_that_is_away_is_not_ours_to_report(postgres):
    with alias_with(PORT="1") as alias:
        assert PostgresAdvisoryLockBackend(alias=alias).check_database([alias]) == []


@pytest.mark.parametrize("backend_class", [PostgresAdvisoryLockBackend, TableLockBackend])
def test_psycopg2_is_refused(postgres, backend_class, monkeypatch):
    monkeypatch.setattr("django.db.backends.postgresql.psycopg_any.is_psycopg3", False)
    with pytest.raises(ImproperlyConfigured, match=r"psycopg 3.*psycopg2"):
        backend_class(alias="postgres")
