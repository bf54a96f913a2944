"""The lock table on SQLite: in a file of its own beside the database, ``<database>.locks``.

Of its own, because SQLite has one writer per file: in the project's file, a lock taken during a caller's write
transaction would wait for it in vain, and lock traffic would make the caller's own first write fail. So the file is
made and kept here, always in WAL mode, and no migration ever touches it.

Time is that of the machine since its boot, which all its processes share, also those in containers, and which no one
can set. What was renewed at a time that is yet to come is from an earlier boot, and over. (WAL works between processes
of one machine only, so there are no others.) Where the system has no such clock, it is the wall clock. A row is kept
after its release, so that the next fencing token can be told from the last one; ``reap`` and the backend itself remove
what nobody has used for a while, and ``floor`` keeps the highest token that was removed.

Nothing here needs to survive a power cut: all holders are gone then, and tokens go on from the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Warning
from django.db import connections

from ... import clock
from ...errors import LockBackendError
from ..base import (
    ALONE,
    MOST_PLACES,
    WANTED_SECONDS,
    Extension,
    Grant,
    Record,
    extend_each_kind,
    finite,
    is_member,
    owner_digest,
    places_of,
)
from . import TableLockBackend, sqlite_file
from . import sqlite_place as place
from . import sqlite_sql as sql
from .sqlite_file import LockFile, lock_file

#: Free rows that have not been used for this many seconds are removed, once in so many releases.
IDLE_SECONDS = 60.0
TIDY_EVERY = 1000
#: A pass of the reaper that began so long ago was broken off, in seconds.
PASS_SECONDS = 600.0
#: How many rows a scan looks at in one statement, which keeps the file for a few milliseconds.
SCAN_ROWS = 5000
#: How often the file is looked at for another process's writes while somebody waits: the longer nothing happened,
#: the more seldom, from 2 ms (about 2 % of a core) to 20 ms after 10 s.
POLL_FASTEST, POLL_SLOWEST, POLL_SHARE = 0.002, 0.02, 1 / 500


class SqliteTableLockBackend(TableLockBackend):
    """What ``TableLockBackend`` is on a SQLite alias. Needs SQLite 3.35.

    Waiters in other processes learn of a release by polling the file: see ``POLL_FASTEST``.
    """

    push = False
    most_places = MOST_PLACES

    def __init__(self, *, alias: str = "default", ttl: Any = 30) -> None:
        super().__init__(alias=alias, ttl=ttl)
        self._file: tuple[str, LockFile] | None = None
        self._until_tidy = TIDY_EVERY
        self._reaped_to, self._pass_began = "", 0.0
        self._quiet_since = 0.0
        self._seen: object = None
        self._freed = 0
        # Not an Event, which is Python: a signal handler's exception inside it leaves its lock taken.
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()

    # The file.

    @property
    def cross_process(self) -> bool:  # type: ignore[override]
        return not place.is_in_memory(self._database())

    def _database(self) -> str:
        return str(connections.settings[self.db_alias]["NAME"])

    @property
    def file(self) -> LockFile:
        """The lock file of the database that the alias has now (a test run changes it)."""
        database = self._database()
        if self._file is None or self._file[0] != database:
            with sqlite_file.making:  # else two threads could make two in memory
                if self._file is None or self._file[0] != database:
                    self.close()
                    self._file = (database, lock_file(database))
        return self._file[1]

    def path(self) -> str:
        """The path of the lock file; empty for a database in memory, whose locks are in memory too."""
        return self.file.path

    def _row(self, deadline: float, statement: sql.Statement, *parameters: Any) -> Any:
        rows = self.file.run(deadline, statement, parameters)
        return rows[0] if rows else None

    # The operations.

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        if is_member(owner):
            rows = self.file.run(deadline, sql.JOIN, (name, owner_digest(owner), holder, ttl, places_of(owner)))
        else:
            rows = self.file.run(deadline, sql.ACQUIRE, (name, owner_digest(owner), holder, ttl))
        if not rows:
            return None
        [(token, acquired_at, *place)] = rows
        if type(token) is not int:
            raise LockBackendError(
                f"{self.file} has no usable fencing token for {name}: somebody has changed its row, which must be "
                f"deleted",
                name=name,
                uncertain=True,
            )
        return Grant(token, acquired_at, acquired_at + ttl, *place)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        return extend_each_kind(
            extensions,
            lambda batch: self._extend(sql.EXTEND, batch, deadline),
            lambda batch: self._extend(sql.EXTEND_MEMBERS, batch, deadline),
        )

    def _extend(self, statement: sql.Statement, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        owners = {owner_digest(each.owner): each.owner for each in extensions}
        batch = [[each.name, digest, each.ttl] for each, digest in zip(extensions, owners, strict=True)]
        return [owners[row[0]] for row in self.file.run(deadline, statement, (json.dumps(batch),))]

    def release(self, name: str, owner: str, deadline: float) -> bool:
        file = self.file
        statement = sql.LEAVE if is_member(owner) else sql.RELEASE
        released = file.run(deadline, statement.count, (name, owner_digest(owner)))
        file.freed += 1
        self._freed += 1
        self._until_tidy -= 1
        if self._until_tidy <= 0:
            self._until_tidy = TIDY_EVERY
            with contextlib.suppress(LockBackendError):  # the lock is free, and the next one may tidy up
                self._remove(sql.REMOVE_IDLE, IDLE_SECONDS, 2 * TIDY_EVERY, clock.now())
        return released == 1

    def adopt(self, name: str, owner: str, new_owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        statement = sql.ADOPT_MEMBER if is_member(owner) else sql.ADOPT
        row = self._row(deadline, statement, name, owner_digest(owner), owner_digest(new_owner), holder, ttl)
        return None if row is None else Grant(row[0], row[1], time.time() + ttl, *row[2:])

    def inspect(self, name: str, deadline: float) -> Record | None:
        return next(iter(self.inspect_many([name], deadline)), None)

    def list_held(self, deadline: float) -> Iterator[Record]:
        yield from self._pages(deadline, sql.HELD)
        yield from self._pages(deadline, sql.HELD_MEMBERS, after=0)

    def scan_held(self, fields: Sequence[str], deadline: float) -> Iterator[Sequence[tuple[Any, ...]]]:
        scan, after = sql.scan(tuple(fields)), ""
        while True:
            end = self._row(deadline, sql.STRETCH, after, SCAN_ROWS - 1)
            # A blob comes after every text.
            yield self.file.run(deadline, scan, (after, b"" if end is None else end[0]))
            deadline = max(deadline, clock.now() + 1.0)
            if end is None:
                break
            after = end[0]
        scan, last = sql.scan_members(tuple(fields)), 0
        while rows := self.file.run(deadline, scan, (last, SCAN_ROWS)):
            yield [row[1:] for row in rows]
            last, deadline = rows[-1][0], max(deadline, clock.now() + 1.0)

    def inspect_many(self, names: Sequence[str], deadline: float) -> list[Record]:
        return [_record(row) for row in self.file.run(deadline, sql.INSPECT_MANY, (json.dumps(list(names)),))]

    def list_expired(self, grace: float, deadline: float) -> Iterator[Record]:
        yield from self._pages(deadline, sql.LIST_EXPIRED, grace)
        yield from self._pages(deadline, sql.EXPIRED_MEMBERS, grace, after=0)

    def _pages(
        self, deadline: float, statement: sql.Statement, *parameters: Any, after: str | int = ""
    ) -> Iterator[Record]:
        """Page by page, so that a slow reader keeps no snapshot of the file: by name, or members by id."""
        column = 0 if after == "" else -1
        while rows := self.file.run(deadline, statement, (*parameters, after, 1000)):
            yield from map(_record, rows)
            after = rows[-1][column]
            deadline = max(deadline, clock.now() + 1.0)

    def reap(self, grace: float, batch_size: int, deadline: float) -> int:
        # From where the last batch ended: the next one need not pass again what lives before it. So one pass removes
        # what had expired when it began; one that was broken off long ago is followed by another.
        if not self._reaped_to:
            self._pass_began = clock.now()
        removed, self._reaped_to = self._remove(sql.REMOVE_EXPIRED, grace, batch_size, deadline, self._reaped_to)
        if removed < batch_size and clock.now() - self._pass_began > PASS_SECONDS:
            more, self._reaped_to = self._remove(sql.REMOVE_EXPIRED, grace, batch_size - removed, deadline)
            removed += more
        if removed < batch_size:
            self._reaped_to = ""
            removed += len(self.file.run(deadline, sql.REMOVE_MEMBERS, (grace, batch_size - removed)))
        if removed < batch_size:
            half, idle = (clock.now() + deadline) / 2, max(grace, IDLE_SECONDS)
            while self._remove(sql.REMOVE_IDLE, idle, batch_size, deadline)[0] == batch_size and clock.now() < half:
                pass
        return removed

    def _remove(
        self, statement: sql.Statement, age: float, limit: int, deadline: float, after: str = ""
    ) -> tuple[int, str]:
        """Remove the first ``limit`` rows after a name that are over for ``age`` seconds; how many, and the last name.

        Their tokens stay the floor for new ones.
        """

        rows = self.file.run(deadline, statement, (age, limit, after))
        return len(rows), max((name for (name,) in rows), default="")

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        file = self.file
        while True:
            row = self._row(deadline, sql.INSPECT, name)
            record = None if row is None else _record(row)
            if record is None:
                left = file.run(deadline, sql.FORCE_LEAVE, (name, fencing_token))
                file.freed += bool(left)
                self._freed += bool(left)
                return _record(left[0]) if left else None
            if fencing_token not in (None, record.fencing_token):
                return None
            if file.run(deadline, sql.FORCE_RELEASE.count, (name, row[4])):
                file.freed += 1
                self._freed += 1
                return record
            if clock.now() >= deadline:
                raise LockBackendError(f"{file}: the holder of {name} changes all the time", name=name)

    def remaining(self, name: str, deadline: float, places: int = ALONE) -> float | None:
        if places != ALONE:
            left = self._row(deadline, sql.REMAINING_MEMBERS, name, places)[0]
            return None if left is None else float(left)
        row = self._row(deadline, sql.REMAINING, name)
        if row is None:
            return None
        left, owner = row
        if not owner:
            self.file.run(deadline, sql.WANT.count, (name, min(WANTED_SECONDS, max(0.0, deadline - clock.now()))))
        return float(left)

    def wait_for_change(self, seconds: float) -> Collection[str] | None:
        """Watch ``PRAGMA data_version``, which goes up when another connection has written."""
        now = clock.now()
        end = now + seconds
        while now < end:
            file = self.file
            # A release by another alias of this process is made on the same connection.
            found = (id(file), file.run(now + seconds, sql.data_version, ()), file.freed - self._freed)
            seen, self._seen = self._seen, found
            if found != seen:
                self._quiet_since = now
                return None
            pause = min(max((now - self._quiet_since) * POLL_SHARE, POLL_FASTEST), POLL_SLOWEST)
            with contextlib.suppress(queue.Empty):
                self._stop.get(timeout=max(0.0, min(pause, end - now)))
                return ()
            now = clock.now()
        return ()

    def stop_watching(self) -> None:
        self._stop.put(None)

    def close(self) -> None:
        """Close the file; leases need no connection, and the next operation opens it again.

        Locks in memory live in the connection: they go when the database's name has changed.
        """
        if self._file is not None and self._file[1].path:
            self._file[1].close()

    # System checks.

    def check(self) -> list[CheckMessage]:
        file = self.file
        if not file.path:
            return []
        problems: list[CheckMessage] = []
        if why := place.trouble(file.database, file.path):
            what, _, hint = why.partition(". ")
            problems.append(Error(f"The lock backend {self.alias!r}: {what}.", hint=f"{hint}.", id="angee_jobs.E030"))
        if type_ := place.network_file_system(file.path):
            problems.append(
                Warning(
                    f"The lock file of {self.alias!r} is on a network file system ({type_}), on which SQLite excludes "
                    f"no other machine.",
                    hint="Put the database on a disk of this machine, or use PostgreSQL or Redis for the locks.",
                    id="angee_jobs.W030",
                )
            )
        if why := place.unwritable(file.path):
            problems.append(
                Warning(
                    f"The lock backend {self.alias!r} cannot be used: {why}.",
                    hint=f"Make the folder {os.path.dirname(file.path)} writable, and not only the database.",
                    id="angee_jobs.W031",
                )
            )
        return problems


def _record(row: tuple[Any, ...]) -> Record:
    name, holder, acquired_at, left, fencing_token, place, *_ = row
    left = finite(left)
    return Record(
        name=name if type(name) is str else bytes(name).decode(errors="replace"),
        holder=holder if type(holder) is str else None,
        acquired_at=finite(acquired_at),
        expires_at=time.time() + left if left is not None else None,
        expires_in=left,
        fencing_token=fencing_token if type(fencing_token) is int else None,
        place=place if type(place) is int else None,
    )
