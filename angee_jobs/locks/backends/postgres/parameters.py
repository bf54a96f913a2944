"""How to connect to the database of an alias: what Django knows of it, for a connection that is not Django's."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ... import process

#: What Django puts among the connection's parameters for psycopg itself, and psycopg does not pass on to libpq.
_NOT_LIBPQ = ("autocommit", "context", "cursor_factory", "prepare_threshold", "row_factory")

#: What a session must not inherit from the user's or the role's settings: limits that would end our requests, or
#: isolation that would make two tries for one row a serialization failure. By the server's version that has them.
SESSION_DEFAULTS = {
    "statement_timeout": ("0", 0),
    "idle_session_timeout": ("0", 140000),
    "transaction_timeout": ("0", 170000),
    "default_transaction_isolation": ("read committed", 0),
    "default_transaction_read_only": ("off", 0),
    "default_transaction_deferrable": ("off", 0),
    "synchronous_commit": ("on", 0),
}


def require_psycopg(alias: str) -> None:
    """ImproperlyConfigured unless Django's PostgreSQL backend runs on psycopg 3."""
    with process.importing:
        try:
            import psycopg  # noqa: F401
            from django.db.backends.postgresql.psycopg_any import is_psycopg3
        except ImportError as error:
            raise ImproperlyConfigured(
                f"The locks on the database {alias!r} need psycopg 3. Install it: pip install 'angee-jobs[postgres]'."
            ) from error
    if not is_psycopg3:
        raise ImproperlyConfigured(
            f"The locks on the database {alias!r} need psycopg 3, and Django uses psycopg2. Install psycopg 3 (pip "
            f"install 'angee-jobs[postgres]'), which Django prefers to psycopg2 where both are installed; or use "
            f"RedisLockBackend."
        )


def connection_parameters(alias: str) -> tuple[dict[str, Any], str | None]:
    """libpq's parameters for ``alias`` as they are now, and the role to assume.

    Read anew for every connection: a test run changes the database's name, a password may be made for the moment.
    """
    from django.utils.connection import ConnectionDoesNotExist

    require_psycopg(alias)
    try:
        connection: Any = connections[alias]
    except ConnectionDoesNotExist as error:
        raise ImproperlyConfigured(f"There is no database {alias!r} in DATABASES.") from error
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(f"The database {alias!r} is {connection.vendor}, not PostgreSQL.")
    parameters = {key: value for key, value in connection.get_connection_params().items() if key not in _NOT_LIBPQ}
    for key, value in parameters.items():
        if callable(value):
            parameters[key] = value()
    return parameters, connection.settings_dict["OPTIONS"].get("assume_role")


def database_name(alias: str) -> str:
    """The name in the settings now; a session to another one is out of date."""
    return str(connections.settings[alias]["NAME"])
