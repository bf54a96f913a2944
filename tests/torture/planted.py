"""Backends with one bug each, as others have had them. The checker has to find each by what happens.

Each is a real backend of this package with the smallest change that brings the bug.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from typing import Any

from angee_jobs.locks import LockNotAcquiredError, block, clock
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.base import Extension, owner_digest
from angee_jobs.locks.backends.table import sqlite_sql as sql
from angee_jobs.locks.backends.table.sqlite import SqliteTableLockBackend

_RELEASE_ANYBODYS = sql.Change("UPDATE lock SET owner = '', holder = '', expires = ?1 WHERE name = ?2 AND expires > ?1")
_UPSERT = sql.Statement("""
INSERT INTO lock VALUES (?2, ?3, '', 0, ?1, ?1 + ?4, 1)
ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, expires = excluded.expires
""")


class NoOwnerCheck(SqliteTableLockBackend):
    """Whoever releases frees the lock, also when it is somebody else's by now."""

    def release(self, name: str, owner: str, deadline: float) -> bool:
        return self.file.run(deadline, _RELEASE_ANYBODYS.count, (name,)) == 1


class RenewalByUpsert(SqliteTableLockBackend):
    """A renewal writes what the holder believes, and so brings a hold back that was lost."""

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        for each in extensions:
            self.file.run(deadline, _UPSERT, (each.name, owner_digest(each.owner), each.ttl))
        return [each.owner for each in extensions]


class ZeroRowsIgnored(SqliteTableLockBackend):
    """A release that changed nothing counts as one."""

    def release(self, name: str, owner: str, deadline: float) -> bool:
        super().release(name, owner, deadline)
        return True


class ClientsClock(SqliteTableLockBackend):
    """The wall clock of the client says what has expired. (It is the whole process's: only such workers run in it.)"""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        sql.now = _wall_clock
        sql.machine_clock = lambda: _wall_clock  # in forked children


class RefusedFreesAnothers(SqliteTableLockBackend):
    """A caller that is refused takes the hold that the lock object has by now for its own, and frees it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        enter = block.Entry.enter

        def enter_and_undo(entry: block.Entry, entrance: block.Entrance, raises: bool) -> bool:
            try:
                return enter(entry, entrance, raises)
            except LockNotAcquiredError:
                hold = entrance.current()
                if hold is not None and hold.live:
                    self.release(hold.name, hold.owner, clock.now() + 5)
                raise

        block.Entry.enter = enter_and_undo  # type: ignore[method-assign]


def _wall_clock() -> float:
    if "LD_PRELOAD" in os.environ:
        return time.time()
    # No libfaketime, so the clock is set by hand.
    try:
        with open(os.environ["FAKETIME_TIMESTAMP_FILE"]) as file:
            return time.time() + float(file.read())
    except (KeyError, OSError, ValueError):
        return time.time()


class UnlockFalseIgnored(PostgresAdvisoryLockBackend):
    """An unlock that the server answers with false, or that nobody is there to answer, counts as one."""

    def release(self, name: str, owner: str, deadline: float) -> bool:
        super().release(name, owner, deadline)
        return True
