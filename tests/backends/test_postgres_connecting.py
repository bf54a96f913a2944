"""Connecting to a real PostgreSQL: what of the project's settings counts, directly and through poolers."""

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from angee_jobs.locks.backends.postgres.pool import Pool
from angee_jobs.locks.backends.postgres.session import Session
from angee_jobs.locks.backends.postgres.statements import Statement
from tests.support.pg_helpers import (
    ECHO,
    SLEEP,
    alias_with,
    database_defaults,
    in_production,
    within,
)

__all__ = ["in_production"]


# Connecting.


def test_a_direct_connection_is_told_from_a_pooled_one(postgres, pgbouncer, pgbouncer_session):
    with alias_with(HOST=str(pgbouncer_session.directory), PORT=str(pgbouncer_session.port)) as pooled:
        for alias, direct in (("postgres", True), ("pgbouncer", False), (pooled, False)):
            session = Session(alias, within())
            assert session.direct is direct
            assert session.execute(ECHO, ["it's $1"], within())[0][0] == b"it's $1"
            assert session.execute(ECHO, [None], within())[0][0] is None
            session.close()


@pytest.mark.parametrize("alias", ["postgres", "pgbouncer"])
def test_other_defaults_change_nothing(postgres, pgbouncer, alias):
    changes = {"default_transaction_isolation": "serializable", "statement_timeout": "400ms", "lock_timeout": "1ms"}
    if alias == "postgres":  # through a pooler nobody can make a statement of a read-only session write
        changes |= {"default_transaction_read_only": "on", "idle_session_timeout": "2s"}
    with database_defaults(postgres, **changes), alias_with(base=alias) as special:
        pgbouncer.restart()
        session = Session(special, within())
        assert session.execute(Statement("SHOW transaction_isolation"), [], within()) == [(b"read committed",)]
        assert session.execute(SLEEP, [0.5], within())[0][1] == b"slept"
        assert session.execute(Statement("SHOW idle_session_timeout"), [], within()) == [(b"0",)]
        assert session.look()
        session.close()
    pgbouncer.restart()


def test_nothing_of_ours_stays_with_the_server_behind_a_pooler(postgres, pgbouncer):
    session = Session("pgbouncer", within())
    session.execute(Statement("SELECT set_config('lock_timeout', '7', true)"), [], within())
    with pytest.raises(Exception, match="division by zero"):
        session.execute(Statement("SELECT 1 / 0"), [], within())
    with pgbouncer.connect() as other:
        for name in ("lock_timeout", "statement_timeout"):
            assert other.execute("SELECT current_setting(%s)", [name]).fetchone() == ("0",)
    assert session.execute(ECHO, ["on"], within())[0][0] == b"on"
    session.close()


def test_the_role_is_assumed(postgres, pgbouncer):
    postgres.query("DROP ROLE IF EXISTS somebody")
    postgres.query("CREATE ROLE somebody")
    for base in ("postgres", "pgbouncer"):
        with alias_with(base=base, OPTIONS={"assume_role": "somebody"}) as alias:
            session = Session(alias, within())
            assert session.execute(Statement("SELECT current_user"), [], within()) == [(b"somebody",)]
            session.close()
    assert pgbouncer.connect().execute("SELECT current_user").fetchone() == ("postgres",)


def test_a_service_and_a_password_made_for_the_moment(postgres, tmp_path, monkeypatch):
    (tmp_path / "services").write_text(
        f"[lockservice]\nhost={postgres.directory}\nport={postgres.port}\ndbname=angee_tests\nuser=postgres\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    calls = []

    def password():
        calls.append(1)
        return "secret"

    service = {
        "NAME": "",
        "HOST": "",
        "PORT": "",
        "USER": "",
        "OPTIONS": {"service": "lockservice", "password": password},
    }
    with alias_with(**service) as alias:
        for number in (1, 2):
            session = Session(alias, within())
            assert session.execute(ECHO, ["x"], within())
            assert len(calls) == number  # asked again for each connection
            session.close()


def test_what_django_keeps_among_the_options_is_not_libpqs(postgres):
    options = {"isolation_level": 4, "server_side_binding": True, "prepare_threshold": 3, "connect_timeout": 5}
    with alias_with(OPTIONS=options) as alias:
        Session(alias, within()).close()


def test_an_option_that_nobody_knows(postgres):
    with alias_with(OPTIONS={"colour": "blue"}) as alias, pytest.raises(ImproperlyConfigured, match="colour"):
        Session(alias, within())


def test_psycopg2_is_refused(postgres, monkeypatch):
    monkeypatch.setattr("django.db.backends.postgresql.psycopg_any.is_psycopg3", False)
    with pytest.raises(ImproperlyConfigured, match=r"psycopg 3.*psycopg2.*angee-jobs\[postgres\]"):
        Session("postgres", within())


def test_the_name_of_the_database_is_read_for_each_connection(postgres, in_production):
    """A test run changes it under a backend that exists already."""
    with alias_with() as alias:
        pool = Pool(alias, 1)
        assert pool.run(Statement("SELECT current_database()"), [], within()) == [(b"angee_tests",)]
        connections.settings[alias]["NAME"] = "postgres"
        assert pool.run(Statement("SELECT current_database()"), [], within()) == [(b"postgres",)]
        pool.close()
