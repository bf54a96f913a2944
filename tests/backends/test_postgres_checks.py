"""`manage.py check --database` of the PostgreSQL backends."""

import pytest
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.errors import LockBackendError
from tests.support.commands import manage
from tests.support.pg_helpers import alias_with, within


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


class Forbids:
    """A router that keeps this app's tables off a database."""

    def allow_migrate(self, db, app_label, **hints):
        return False if (db, app_label) == ("special", "angee_jobs") else None


@pytest.fixture
def bare(postgres):
    """An alias of a database without tables."""
    postgres.query("CREATE DATABASE bare", dbname="postgres")
    with alias_with(NAME="bare") as alias:
        yield alias
    postgres.query("DROP DATABASE bare WITH (FORCE)", dbname="postgres")


@pytest.mark.parametrize("backend_class", [PostgresAdvisoryLockBackend, TableLockBackend])
def test_the_command_that_makes_the_tables_does_not_warn_of_their_absence(bare, backend_class, monkeypatch):
    backend = backend_class(alias=bare)
    monkeypatch.setattr("sys.argv", ["manage.py", "check", "--database", bare])
    assert len(backend.check_database([bare])) == 1
    monkeypatch.setattr("sys.argv", ["manage.py", "migrate", "--database", bare])
    assert backend.check_database([bare]) == []


def test_a_first_migrate_prints_no_warning(bare):
    """As an operator runs it, in a project whose only database that is."""
    settings = "tests.support.settings_first_migrate"
    done = manage("check", "--database", "default", DJANGO_SETTINGS_MODULE=settings)
    assert "angee_jobs.W001" in done.stderr
    done = manage("migrate", "angee_jobs", DJANGO_SETTINGS_MODULE=settings)
    assert done.returncode == 0, done.stderr
    assert "W001" not in done.stderr
    done = manage("check", "--database", "default", DJANGO_SETTINGS_MODULE=settings)
    assert "angee_jobs.W001" not in done.stderr


@pytest.mark.parametrize("backend_class", [PostgresAdvisoryLockBackend, TableLockBackend])
@pytest.mark.parametrize("argv", ["check", "migrate"])
def test_a_router_that_forbids_the_tables_is_named(bare, backend_class, argv, monkeypatch):
    """To run `migrate` again would not help."""
    monkeypatch.setattr("sys.argv", ["manage.py", argv])
    backend = backend_class(alias=bare)
    with override_settings(DATABASE_ROUTERS=[Forbids()]):
        [warning] = backend.check_database([bare])
        assert warning.id == "angee_jobs.W001"
        assert "DATABASE_ROUTERS" in warning.hint
        with pytest.raises(LockBackendError, match="DATABASE_ROUTERS"):
            backend.acquire("angee:name:bare", "owner", 30.0, "{}", within())


@pytest.mark.parametrize("backend_class", [PostgresAdvisoryLockBackend, TableLockBackend])
def test_an_app_that_is_not_installed_is_named(bare, backend_class, monkeypatch):
    """Its checks do not run then, and `migrate` knows no such app."""
    monkeypatch.setattr(apps, "is_installed", lambda name: name != "angee_jobs")
    with pytest.raises(LockBackendError, match=r'add "angee_jobs" to INSTALLED_APPS, then run manage.py migrate'):
        backend_class(alias=bare).acquire("angee:name:bare", "owner", 30.0, "{}", within())


def test_a_server_that_is_away_is_not_ours_to_report(postgres):
    with alias_with(PORT="1") as alias:
        assert PostgresAdvisoryLockBackend(alias=alias).check_database([alias]) == []


@pytest.mark.parametrize("backend_class", [PostgresAdvisoryLockBackend, TableLockBackend])
def test_psycopg2_is_refused(postgres, backend_class, monkeypatch):
    monkeypatch.setattr("django.db.backends.postgresql.psycopg_any.is_psycopg3", False)
    with pytest.raises(ImproperlyConfigured, match=r"psycopg 3.*psycopg2"):
        backend_class(alias="postgres")
