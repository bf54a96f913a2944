"""The lock table: leases in a table of the database that a project already has.

``TableLockBackend(alias=...)`` is the class to name in the settings. What it makes is one of two, by the vendor of
the alias: ``sqlite.py`` keeps the table in a file of its own beside the database, ``postgres.py`` in the
database itself, where the migrations of this app put it.
"""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured

from ...types import Seconds, lease_seconds
from ..base import BaseLockBackend


class TableLockBackend(BaseLockBackend):
    """Leases in the lock table of the database ``alias``; ``ttl`` is the length of a lease in seconds.

    Works on SQLite and PostgreSQL, there also through any pooler. ImproperlyConfigured for other databases.

    Example::

        ANGEE_JOBS_LOCKS = {
            "default": {
                "BACKEND": "angee_jobs.locks.TableLockBackend",
                "OPTIONS": {"alias": "default", "ttl": 60},
            },
        }
    """

    def __new__(cls, *, alias: str = "default", ttl: Seconds = 30) -> TableLockBackend:
        chosen = _class_for(alias) if cls is TableLockBackend else cls
        return super().__new__(chosen)

    def __init__(self, *, alias: str = "default", ttl: Seconds = 30) -> None:
        self.db_alias = alias
        self.ttl = lease_seconds(ttl)


def _class_for(alias: str) -> type[TableLockBackend]:
    from django.db import connections
    from django.utils.connection import ConnectionDoesNotExist

    try:
        vendor = connections[alias].vendor
    except (ConnectionDoesNotExist, TypeError) as error:
        raise ImproperlyConfigured(
            f"TableLockBackend: there is no database {alias!r}; DATABASES has {', '.join(map(repr, connections))}."
        ) from error
    if vendor == "sqlite":
        from .sqlite import SqliteTableLockBackend

        return SqliteTableLockBackend
    if vendor == "postgresql":
        from .postgres import PostgresTableLockBackend

        return PostgresTableLockBackend
    raise ImproperlyConfigured(
        f"TableLockBackend works on SQLite and PostgreSQL, and the database {alias!r} is {vendor}. Use a Redis or "
        f"Valkey cache with RedisLockBackend, or add a PostgreSQL alias."
    )
