"""The throw-away database of one demo."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.utils import ConnectionHandler


def database_in(directory: str) -> dict:
    """Settings of a SQLite database that several processes write to at once."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.path.join(directory, "demo.sqlite3"),
        "OPTIONS": {
            "timeout": 30,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;",
        },
    }


@contextmanager
def default_database_in(directory: str) -> Iterator[None]:
    """Make a new database that is this thread's default one in the block. The usual one is left alone."""
    usual = connections[DEFAULT_DB_ALIAS]
    connection = ConnectionHandler({DEFAULT_DB_ALIAS: database_in(directory)})[DEFAULT_DB_ALIAS]
    connections[DEFAULT_DB_ALIAS] = connection
    try:
        call_command("migrate", database=DEFAULT_DB_ALIAS, interactive=False, verbosity=0)
        yield
    finally:
        connection.close()
        connections[DEFAULT_DB_ALIAS] = usual
