"""How projects set up PostgreSQL: the locks work, or say why not, and the project's own connection is what it was."""

import importlib.util
import sys
import types

import pytest
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from angee_jobs.locks import LockBackendError
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.lock import Lock
from tests.support.pg_helpers import alias_with, database_defaults
from tests.support.servers import PostgresServer, free_port

SETTINGS = ("lock_timeout", "statement_timeout", "default_transaction_isolation", "synchronous_commit", "role")


@pytest.fixture(params=[PostgresAdvisoryLockBackend, TableLockBackend])
def backend_class(request, postgres):
    return request.param


def works(backend):
    first, second = Lock("setup", backend=backend), Lock("setup", backend=backend)
    with first:
        assert not second.acquire()
        assert backend.is_held("setup")
    assert second.acquire()
    assert second.release()


def settings_of(alias):
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(f'current_setting({name!r})' for name in SETTINGS)}")
        return cursor.fetchone()


@pytest.mark.parametrize(
    "changes",
    [
        {"CONN_MAX_AGE": 0},
        {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True},
        {"ATOMIC_REQUESTS": True},
        {"AUTOCOMMIT": True, "DISABLE_SERVER_SIDE_CURSORS": True},
        {"OPTIONS": {"isolation_level": 4}},  # SERIALIZABLE
        {"OPTIONS": {"isolation_level": 3}},  # REPEATABLE READ
        {"OPTIONS": {"server_side_binding": True}},
        {"OPTIONS": {"options": "-c default_transaction_isolation=serializable -c lock_timeout=5"}},
        {"OPTIONS": {"application_name": "shop"}},
    ],
    ids=str,
)
def test_settings_of_the_alias(backend_class, changes):
    with alias_with(**changes) as alias:
        before = settings_of(alias)
        works(backend_class(alias=alias))
        assert settings_of(alias) == before


@pytest.mark.parametrize("level", [3, 4])
def test_inside_a_transaction_of_another_isolation(backend_class, level):
    with alias_with(OPTIONS={"isolation_level": level}) as alias:
        backend = backend_class(alias=alias)
        with transaction.atomic(using=alias):
            before = settings_of(alias)
            lock = Lock("setup", backend=backend)
            assert lock.acquire()
            assert not Lock("setup", backend=backend).acquire()
            assert lock.release()
            assert settings_of(alias) == before


@pytest.mark.skipif(importlib.util.find_spec("psycopg_pool") is None, reason="needs psycopg_pool")
def test_a_connection_pool_that_is_used_up(backend_class):
    with alias_with(OPTIONS={"pool": {"min_size": 1, "max_size": 1, "timeout": 10}}) as alias:
        settings_of(alias)  # the only one
        works(backend_class(alias=alias))
        connections[alias].close_pool()


def test_the_option_pool_needs_no_pool(backend_class):
    with alias_with(OPTIONS={"pool": True}) as alias:
        works(backend_class(alias=alias))


def test_an_engine_of_the_projects_own(backend_class, postgres, monkeypatch):
    """One that makes up its password, or its host, for each connection."""
    from django.db.backends.postgresql import base

    class DatabaseWrapper(base.DatabaseWrapper):
        def get_connection_params(self):
            return super().get_connection_params() | {"host": str(postgres.directory), "password": "made up"}

    for name in ("own_engine", "own_engine.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["own_engine.base"].DatabaseWrapper = DatabaseWrapper
    with alias_with(ENGINE="own_engine", HOST="nowhere.invalid") as alias:
        works(backend_class(alias=alias))


def test_several_databases(backend_class):
    """The locks are where their alias says, whatever a router says about models."""
    assert connections[DEFAULT_DB_ALIAS].vendor == "sqlite"
    works(backend_class(alias="postgres"))


def test_a_replica_is_refused(server_dir, backend_class):
    with PostgresServer(server_dir, port=free_port()) as server:
        with alias_with(HOST=str(server.directory), PORT=str(server.port)) as alias:
            from tests.conftest import migrate

            migrate(alias)
            server.stop()
            (server.data / "standby.signal").touch()
            server.start()
            backend = backend_class(alias=alias)
            lock = Lock("setup", backend=backend)
            with pytest.raises(LockBackendError, match="read-only"):
                lock.acquire()
            assert not lock.held
            assert server.advisory_locks() == 0


def test_defaults_of_the_database(backend_class, postgres):
    with database_defaults(postgres, lock_timeout="1ms", default_transaction_deferrable="on"):
        with alias_with() as alias:
            works(backend_class(alias=alias))
