"""The lock table on SQLite: in a file of its own beside the database, ``<database>.locks``.

Of its own, because SQLite has one writer per file: in the project's file, a lock taken during a caller's write
transaction would wait for it in vain, and lock traffic would make the caller's own first write fail. So the file is
made and kept here, always in WAL mode, and no migration ever touches it.

Time is CLOCK_BOOTTIME, which all processes of a machine share and which no one can set; the machine's boot is part of
a row, and what an earlier boot left is over. (WAL works between processes of one machine only, so there are no
others.) Where the system has no such clock, it is the wall clock. A row is kept after its release, so that the next
fencing token can be told from the last one; ``reap`` and the backend itself remove what nobody has used for a while,
and remember in ``floor`` the highest token that was removed.

Nothing here needs to survive a power cut: all holders are gone then, and tokens go on from the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

from django.db import connections

from ... import clock, process
from ...errors import LockBackendError
from ..base import Extension, Grant, Record, finite, owner_digest
from . import TableLockBackend
from . import sqlite_sql as sql

SUFFIX = ".locks"
#: SQLite itself waits this long for another process's write before the deadline is looked at again, in ms.
BUSY_MS = 50
#: A write copies whole pages into the log, so small ones are cheaper. Still smaller ones would hold no whole row, which
#: makes a file of many holds three times as large, and slow to read.
PAGE_BYTES = 2048
#: What SQLite says, having done nothing, when somebody put another file in the place of the one that is open.
REPLACED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_READONLY_DBMOVED)
#: A file that is not the one that was there a moment ago is opened anew this many times. A new one needs two.
OPEN_TRIES = 5
#: What SQLite says of a damaged file, and of one whose log (-wal) or index (-shm) is that of another one.
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR)
REMEDY = "; if that lasts, end all processes that use it, and delete it together with its -wal and -shm"
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

T = TypeVar("T")


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class SqliteTableLockBackend(TableLockBackend):
    """What ``TableLockBackend`` is on a SQLite alias. Needs SQLite 3.35.

    Waiters in other processes learn of a release by polling the file: see ``POLL_FASTEST``.
    """

    push = False

    def __init__(self, *, alias: str = "default", ttl: Any = 30) -> None:
        super().__init__(alias=alias, ttl=ttl)
        # Re-entrant, since a signal handler that uses locks may interrupt this very thread in here.
        self._mutex = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._opened_for = ""
        self._file: tuple[str, tuple[int, int] | None] | None = None
        self._until_tidy = TIDY_EVERY
        self._reaped_to, self._pass_began = "", 0.0
        self._quiet_since = 0.0
        self._seen_version = 0
        # Not an Event, which is Python: a signal handler's exception inside it leaves its lock taken.
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        _instances.add(self)

    # The file.

    @property
    def cross_process(self) -> bool:  # type: ignore[override]
        return not self._in_memory(self._database())

    def _database(self) -> str:
        return str(connections.settings[self.db_alias]["NAME"])

    @staticmethod
    def _in_memory(database: str) -> bool:
        return ":memory:" in database or "mode=memory" in database

    def path(self) -> str:
        """The lock file; empty for a database in memory, whose locks are in memory too."""
        database = self._database()
        if self._in_memory(database):
            return ""
        if database.startswith("file:"):
            database = database[len("file:") :].partition("?")[0]
        # The real path, so that two settings that reach one database by different links share its locks.
        return os.path.realpath(database) + SUFFIX

    def _connect(self) -> sqlite3.Connection:
        """The open connection to the file that the database's name asks for now (a test run changes it)."""
        database = self._database()
        if self._connection is not None and self._opened_for == database and self._in_place():
            return self._connection
        self.close()
        path = self.path()
        if sqlite3.sqlite_version_info < (3, 35):
            raise LockBackendError(f"The lock table needs SQLite 3.35, and this is {sqlite3.sqlite_version}")
        for _ in range(OPEN_TRIES):
            found = _identity(path)
            connection = self._open(path, database)
            # Another one may have come in its place meanwhile. Whoever took that for the open one would have holders of
            # his own, whom nobody else sees, until his process ends. A new file is looked at again for the same reason.
            if not path or _identity(path) == found:
                self._file = (path, found) if path else None
                self._connection, self._opened_for = connection, database
                return connection
            connection.close()
        raise LockBackendError(f"The lock file {path} is being replaced again and again")

    def _open(self, path: str, database: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            path or ":memory:", timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(connection, path, database)
        except BaseException:
            connection.close()
            raise
        return connection

    def _in_place(self) -> bool:
        """Whether the open file is still the one that others find: it may have been deleted, or put back from a copy.

        What it holds is lost then, since another process would not see it.
        """
        return self._file is None or _identity(self._file[0]) == self._file[1]

    def _prepare(self, connection: sqlite3.Connection, path: str, database: str) -> None:
        """Make the tables in a new file; refuse one that is not ours."""
        execute = connection.execute
        # Where the file is new. Each commit writes a page or two whole, and a row is far smaller than one of 4 KiB.
        execute(f"PRAGMA page_size = {PAGE_BYTES}")
        if path and execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise LockBackendError(f"The lock file {path} cannot be put into WAL mode")
        # A checkpoint is synced, a commit is not: see the module about power cuts.
        execute("PRAGMA synchronous = NORMAL")
        with _transaction(connection):
            empty = execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
            if empty:
                for statement in sql.SCHEMA.split(";"):
                    execute(statement)
            elif (
                execute("PRAGMA application_id").fetchone()[0] != sql.APPLICATION_ID
                or execute("PRAGMA user_version").fetchone()[0] != sql.VERSION
            ):
                raise LockBackendError(
                    f"{path} is in the place of the lock file, but is not one that this version made: move it away"
                )
        if empty and path:
            _share_with_users_of(os.path.realpath(path.removesuffix(SUFFIX)), path)

    def _run(self, deadline: float, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` on the connection, again while another process keeps the file busy, until the deadline."""
        reopened = False
        while True:
            # Not acquire() with a timeout: an exception of a signal handler between it and a try would lock us out.
            with self._mutex:
                try:
                    return work(self._connect())
                except sqlite3.Error as error:
                    code = getattr(error, "sqlite_errorcode", 0)
                    busy = code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                    if not busy:
                        self.close()  # whatever is wrong with the file, it is looked at anew
                        if code in REPLACED and not reopened:
                            reopened = True
                            continue
                    if not busy or clock.now() >= deadline:
                        remedy = REMEDY if code & 0xFF in DAMAGED else ""
                        raise LockBackendError(
                            f"The lock file {self.path() or 'in memory'} cannot be used: {error}{remedy}"
                        ) from error

    def _rows(self, deadline: float, statement: sql.Statement, *parameters: Any) -> list[Any]:
        return self._run(deadline, lambda connection: statement(connection, *parameters).fetchall())

    def _row(self, deadline: float, statement: sql.Statement, *parameters: Any) -> Any:
        return self._run(deadline, lambda connection: statement(connection, *parameters).fetchone())

    # The verbs.

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        acquired_at = time.time()
        row = self._row(deadline, sql.ACQUIRE, name, owner_digest(owner), holder, acquired_at, ttl)
        if row is None:
            return None
        if type(row[0]) is not int:
            raise LockBackendError(
                f"The lock file {self.path() or 'in memory'} has no usable fencing token for {name}: somebody has "
                f"changed its row, which must be deleted",
                name=name,
                uncertain=True,
            )
        return Grant(row[0], acquired_at, acquired_at + ttl)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        owners = {owner_digest(each.owner): each.owner for each in extensions}
        batch = [[each.name, digest, each.ttl] for each, digest in zip(extensions, owners, strict=True)]
        return [owners[row[0]] for row in self._rows(deadline, sql.EXTEND, json.dumps(batch))]

    def release(self, name: str, owner: str, deadline: float) -> bool:
        released = self._run(deadline, lambda connection: sql.RELEASE(connection, name, owner_digest(owner)).rowcount)
        self._until_tidy -= 1
        if self._until_tidy <= 0:
            self._until_tidy = TIDY_EVERY
            self._remove(sql.REMOVE_IDLE, IDLE_SECONDS, 2 * TIDY_EVERY, deadline)
        return released == 1

    def adopt(self, name: str, owner: str, heir: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        row = self._row(deadline, sql.ADOPT, name, owner_digest(owner), owner_digest(heir), holder, ttl)
        return None if row is None else Grant(row[0], row[1], time.time() + ttl)

    def inspect(self, name: str, deadline: float) -> Record | None:
        row = self._row(deadline, sql.INSPECT, name)
        return None if row is None else _record(row)

    def list_held(self, deadline: float) -> Iterator[Record]:
        return self._pages(deadline, sql.HELD)

    def scan_held(self, fields: Sequence[str], deadline: float) -> Iterator[Sequence[tuple[Any, ...]]]:
        scan, after = sql.scan(tuple(fields)), ""
        while True:
            end = self._row(deadline, sql.STRETCH, after, SCAN_ROWS - 1)
            # A blob comes after every text.
            yield self._rows(deadline, scan, after, b"" if end is None else end[0])
            if end is None:
                return
            after = end[0]
            deadline = max(deadline, clock.now() + 1.0)

    def inspect_many(self, names: Sequence[str], deadline: float) -> list[Record]:
        return [_record(row) for row in self._rows(deadline, sql.INSPECT_MANY, json.dumps(list(names)))]

    def list_expired(self, grace: float, deadline: float) -> Iterator[Record]:
        return self._pages(deadline, sql.LIST_EXPIRED, grace)

    def _pages(self, deadline: float, statement: sql.Statement, *parameters: Any) -> Iterator[Record]:
        """Page by page, so that a slow reader keeps no snapshot of the file."""
        after = ""
        while rows := self._rows(deadline, statement, *parameters, after, 1000):
            yield from map(_record, rows)
            after = rows[-1][0]
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

        def work(connection: sqlite3.Connection) -> tuple[int, str]:
            with _transaction(connection):
                rows = statement(connection, age, limit, after).fetchall()
                if rows:
                    connection.execute(sql.RAISE_FLOOR, [max(token for _, token in rows)])
            return len(rows), max((name for name, _ in rows), default="")

        return self._run(deadline, work)

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        def work(connection: sqlite3.Connection) -> Record | None:
            with _transaction(connection):
                row = sql.INSPECT(connection, name).fetchone()
                record = None if row is None else _record(row)
                if record is None or fencing_token not in (None, record.fencing_token):
                    return None
                sql.FORCE_RELEASE(connection, name)
                return record

        return self._run(deadline, work)

    def remaining(self, name: str, deadline: float) -> float | None:
        row = self._row(deadline, sql.REMAINING, name)
        return None if row is None else float(row[0])

    def wait_for_change(self, seconds: float) -> Collection[str] | None:
        """Watch ``PRAGMA data_version``, which goes up when another connection has written."""
        now = clock.now()
        end = now + seconds
        while now < end:
            version = self._run(
                now + seconds, lambda connection: connection.execute("PRAGMA data_version").fetchone()[0]
            )
            seen, self._seen_version = self._seen_version, version
            if version != seen:
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
        """Close the file; leases need no connection, and the next verb opens it again.

        Locks in memory live in the connection: they go when the database's name has changed.
        """
        with self._mutex:
            connection, opened_for = self._connection, self._opened_for
            if connection is not None and not (self._in_memory(opened_for) and opened_for == self._database()):
                self._connection = None
                connection.close()


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _record(row: tuple[Any, ...]) -> Record:
    name, holder, acquired_at, left, fencing_token, this_boot = row
    left = finite(left)
    return Record(
        name=name if type(name) is str else bytes(name).decode(errors="replace"),
        holder=holder if type(holder) is str else None,
        acquired_at=finite(acquired_at),
        expires_at=time.time() + left if this_boot and left is not None else None,
        expires_in=left,
        fencing_token=fencing_token if type(fencing_token) is int else None,
    )


def _share_with_users_of(database: str, path: str) -> None:
    """Give the lock file the mode and owner of the database, as SQLite does with its own side files.

    Otherwise the cron job of root would make a file that the web server's user cannot write.
    """
    try:
        like = os.stat(database)
        for each in (path, path + "-wal", path + "-shm"):
            os.chmod(each, like.st_mode & 0o777)
            if os.geteuid() == 0:
                os.chown(each, like.st_uid, like.st_gid)
    except (OSError, AttributeError):
        pass


# SQLite connections must not cross a fork, and a copy of one in the child spoils the child's own: so all are closed
# before it. Leases do not need them.
_instances: weakref.WeakSet[SqliteTableLockBackend] = weakref.WeakSet()


def _before_fork() -> list[Any]:
    paused = []
    for backend in list(_instances):
        if backend._mutex.acquire(timeout=1.0):
            paused.append(backend._mutex)
            backend.close()
    return paused


def _in_parent(paused: list[Any]) -> None:
    for mutex in paused:
        mutex.release()


def _in_child() -> None:
    for backend in list(_instances):
        backend._mutex = threading.RLock()


process.on_fork(before=_before_fork, in_parent=_in_parent, in_child=_in_child)
