"""The tables and their migration, on both kinds of database."""

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections

from angee_jobs.models import LockGuard, LockMember, SessionHold, TaskLock
from tests.support.pg_helpers import alias_with

SEQUENCE = "SELECT seqstart, seqcache FROM pg_sequence WHERE seqrelid = 'angee_jobs_fencing_token'::regclass"


def test_the_migration_is_complete():
    call_command("makemigrations", "angee_jobs", check=True, dry_run=True, verbosity=0)


def test_it_goes_back_and_forth_on_sqlite():
    tables = {model._meta.db_table for model in (TaskLock, LockMember, LockGuard, SessionHold)}
    call_command("migrate", "angee_jobs", "zero", database="other", verbosity=0)
    assert not tables & set(connections["other"].introspection.table_names())
    call_command("migrate", "angee_jobs", database="other", verbosity=0)
    assert tables <= set(connections["other"].introspection.table_names())


def test_it_goes_back_and_forth_on_postgres(postgres):
    """And the tokens of a sequence that was made again go on above all earlier ones."""
    postgres.query("CREATE DATABASE migrations", dbname="postgres")
    with alias_with(NAME="migrations") as alias:
        starts = []
        for _ in range(2):
            call_command("migrate", "angee_jobs", database=alias, verbosity=0)
            [(start, cache)] = postgres.query(SEQUENCE, dbname="migrations")
            starts.append(start)
            assert cache == 1
            postgres.query("SELECT nextval('angee_jobs_fencing_token')", dbname="migrations")
            call_command("migrate", "angee_jobs", "zero", database=alias, verbosity=0)
            left = postgres.query("SELECT relname FROM pg_class WHERE relname LIKE 'angee_jobs%'", dbname="migrations")
            assert left == []
        assert starts[1] > starts[0] > 1_700_000_000_000_000  # microseconds since 1970
        connections[alias].close()
        postgres.query("DROP DATABASE migrations", dbname="postgres")


@pytest.mark.parametrize(
    ("table", "columns"), [("angee_jobs_tasklock", ["digest"]), ("angee_jobs_lockmember", ["digest", "number"])]
)
def test_no_column_that_changes_has_an_index(table, columns, postgres):
    """Else updates of the lock table could not stay on their page."""
    [indexed] = postgres.query(
        "SELECT array_agg(DISTINCT attname::text) FROM pg_attribute WHERE attrelid IN"
        " (SELECT indexrelid FROM pg_index WHERE indrelid = %s::regclass)",
        [table],
    )
    assert indexed == (columns,)
    [(options,)] = postgres.query("SELECT reloptions FROM pg_class WHERE relname = %s", [table])
    assert "fillfactor=50" in options


def test_the_sequence_belongs_to_no_column(postgres):
    """Or `manage.py flush` would restart it."""
    [(owners,)] = postgres.query(
        "SELECT count(*) FROM pg_depend WHERE objid = 'angee_jobs_fencing_token'::regclass AND deptype IN ('a', 'i')"
    )
    assert owners == 0


@pytest.mark.parametrize("model", [TaskLock, LockMember, LockGuard, SessionHold])
def test_models_say_what_they_are(model):
    assert str(model(name="angee:name:x")) == "angee:name:x"
    assert model._meta.default_permissions == ("view",)
    assert all(str(field.verbose_name) for field in model._meta.fields)
    assert apps.get_model(model._meta.label) is model
