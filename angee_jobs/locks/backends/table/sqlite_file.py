"""The lock file of one SQLite database in this process: its one connection, and whether it is still the file of others.

One for each path, whatever number of aliases use it. SQLite keeps per process which locks it has on a file, so that one
is opened anew only after all of the process's connections to it are closed.

Requests are single statements. In an open transaction, as an exception of a signal handler may leave one between BEGIN
and COMMIT, this process would go on by itself, and everybody else would wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ... import clock, process
from ...errors import LockBackendError
from . import sqlite_place as place
from . import sqlite_sql as sql
from .sqlite_sql import Parameters

#: SQLite waits so long for another process's write, in ms. Short, since the mutex is held meanwhile.
BUSY_MS = 5
#: After that the mutex is free for so many seconds, for another thread or a fork.
BUSY_PAUSE = 0.003
#: A wait for the mutex looks at its deadline again after so many seconds.
SLICE = 0.05
#: A write copies whole pages into the log, so small ones are cheaper. Still smaller ones would hold no whole row, which
#: makes a file of many holds three times as large, and slow to read.
PAGE_BYTES = 2048
#: What SQLite says, having done nothing, when somebody put another file in the place of the one that is open.
REPLACED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_READONLY_DBMOVED)
#: A file that is not the one that was there a moment ago is opened anew this many times. A new one needs two.
OPEN_TRIES = 5
#: What SQLite says of a damaged file, and of one whose log (-wal) or index (-shm) is that of another one.
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR)
#: What it says where it may not write.
UNWRITABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
REMEDY = "; if that lasts, end all processes that use it, and delete it together with its -wal and -shm"
#: The folder's time of change is trusted when it has stayed for so many seconds: some file systems count in steps of
#: two; those that count finer than milliseconds take the time of the machine's last tick.
SETTLED, SETTLED_FINE = 3.0, 0.5
#: A fork waits so long for a request that is under way, in seconds.
FORK_SECONDS = 5.0

try:
    from posix import getpid  # what a test makes of os.getpid() is no fork
except ImportError:
    from os import getpid

T = TypeVar("T")

#: Held while a file is added: one that came after the look of a thread that forks was opened during its fork.
making = threading.RLock()
_files: dict[str, LockFile] = {}
_all: weakref.WeakSet[LockFile] = weakref.WeakSet()


def lock_file(database: str) -> LockFile:
    """The one of this process for ``DATABASES[...]["NAME"]``; for a database in memory a new one, also in memory."""
    with making:
        if place.is_in_memory(database):
            return LockFile("", "")
        real = place.real_path(database)
        path = os.path.realpath(real + place.SUFFIX)
        if path not in _files:
            _files[path] = LockFile(path, real)
        return _files[path]


class LockFile:
    """``run()`` does something with the file, within a deadline."""

    def __init__(self, path: str, database: str) -> None:
        #: The real paths; empty in memory.
        self.path, self.database = path, database
        self._directory = os.path.dirname(path)
        #: How many holds the backends of this process have freed here, which none of them sees as a change of the file.
        self.freed = 0
        self._connection: sqlite3.Connection | None = None
        self._found: tuple[place.Identity | None, ...] = ()
        #: What was seen of the folder, since when, and whether that is trusted.
        self._folder: tuple[int, ...] | None = None
        self._folder_since = 0.0
        self._settled = False
        self._given_up: place.Identity | None = None
        self._new_mutex()
        _all.add(self)

    def _new_mutex(self) -> None:
        # Re-entrant, since a signal handler that uses locks may interrupt this very thread in here.
        self.mutex = threading.RLock()
        # `with self._slice` takes it within SLICE seconds, or raises KeyError. All in C: between acquire() and a try an
        # exception of a signal handler would leave it taken for ever.
        answers = iter(functools.partial(self.mutex.acquire, True, SLICE), None)
        take = map({True: True}.__getitem__, answers).__next__
        methods = {"__enter__": staticmethod(take), "__exit__": staticmethod(self.mutex.__exit__)}
        self._slice: contextlib.AbstractContextManager[object] = type("Slice", (), methods)()

    def run(self, deadline: float, work: Callable[[sqlite3.Connection, Parameters], T], parameters: Parameters) -> T:
        """``work(connection, parameters)``, again while another process keeps the file busy, until the deadline."""
        if getpid() != process.pid:  # also where no lock but a backend that was kept over a fork is asked
            process.check()
        reopened = False
        while True:
            entered = False
            try:
                with self._slice:
                    entered = True
                    try:
                        connection = self._connection
                        if connection is None or not self._in_place():
                            connection = self._open()
                        return work(connection, parameters)
                    except sqlite3.Error as error:
                        busy = self._is_busy(error, deadline, reopened)
            except KeyError:
                if entered:
                    raise
                if clock.now() < deadline:
                    continue
                raise LockBackendError(f"{self} is busy with other requests of this process") from None
            if busy:
                time.sleep(min(BUSY_PAUSE, max(0.0, deadline - clock.now())))
            else:
                reopened = True

    def _is_busy(self, error: sqlite3.Error, deadline: float, reopened: bool) -> bool:
        """After an error that is worth another try, whether to wait before it. Raises for any other."""
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            if clock.now() < deadline:
                return True
        else:
            if self.path:
                self._close()  # whatever is wrong with the file, it is looked at anew
            # Replaced; or closed by a fork in a signal handler. Nothing was done.
            if not reopened and (code in REPLACED or isinstance(error, sqlite3.ProgrammingError)):
                return False
        remedy = ""
        if code & 0xFF in DAMAGED:
            remedy = REMEDY
        elif code & 0xFF in UNWRITABLE and (why := place.unwritable(self.path)):
            remedy = f"; {why}"
        raise LockBackendError(f"{self} cannot be used: {error}{remedy}") from error

    def __str__(self) -> str:
        return f"The lock file {self.path or 'in memory'}"

    def connection(self) -> sqlite3.Connection:
        """The open connection. The mutex must be held."""
        connection = self._connection
        return self._open() if connection is None or not self._in_place() else connection

    def _in_place(self) -> bool:
        """Whether the open files are still those that others find: they may have been deleted, or put back from a copy.

        Also the log. A process that reads its own lock file, for a backup say, loses its locks on it when it closes it
        again; the next process that ends takes itself for the last one, and deletes the log. What is written into a
        deleted file is seen by nobody else.
        """
        if not self.path:
            return True
        try:
            folder = os.stat(self._directory)
        except OSError:
            return False
        # It changes with each file that is made, deleted or renamed in it, so that one look is enough for all three.
        seen = (folder.st_mtime_ns, folder.st_ino, folder.st_dev)
        if seen != self._folder:
            self._settled, self._folder_since, self._folder = False, clock.now(), seen
        elif self._settled:
            return True
        stayed = clock.now() - self._folder_since
        if place.identities(self.path) != self._found:
            return False
        self._settled = stayed > (SETTLED_FINE if folder.st_mtime_ns % 1_000_000 else SETTLED)
        return True

    def _open(self) -> sqlite3.Connection:
        self._close()
        path = self.path
        if sqlite3.sqlite_version_info < (3, 35):
            raise LockBackendError(f"The lock table needs SQLite 3.35, and this is {sqlite3.sqlite_version}")
        for _ in range(OPEN_TRIES):
            if path and (why := place.trouble(self.database, path)):
                raise LockBackendError(why)
            before = place.identity(path)
            if self._given_up and before == self._given_up:
                raise LockBackendError(
                    f"{self} cannot be used in this process, which was forked while another thread was using it: "
                    f"start the process anew, or fork when no lock is being taken"
                )
            connection = sqlite3.connect(
                path or ":memory:", timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection)
                # Another one may have come in its place meanwhile. Whoever took that for the open one would have
                # holders of his own, whom nobody else sees. A new file is looked at again for the same reason.
                found = place.identities(path) if path else ()
                if not path or (found[0] == before and None not in found):
                    self._settled, self._found = False, found
                    self._connection = connection
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
        raise LockBackendError(f"{self} is being replaced again and again")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables in a new file; refuse one that is not ours."""
        execute = connection.execute
        if hasattr(connection, "setconfig"):  # Python 3.12
            # Who closes the file last deletes the log, also when it only believes to be the last: see _in_place().
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, True)
        # Where the file is new. Each commit writes a page or two whole, and a row is far smaller than one of 4 KiB.
        execute(f"PRAGMA page_size = {PAGE_BYTES}")
        if self.path and execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise LockBackendError(f"{self} cannot be put into WAL mode")
        # A checkpoint is synced, a commit is not: no hold needs to survive a power cut.
        execute("PRAGMA synchronous = NORMAL")
        execute("BEGIN IMMEDIATE")  # broken off, it ends with the connection
        empty = execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
        if empty:
            for statement in sql.SCHEMA:
                execute(statement)
        elif (
            execute("PRAGMA application_id").fetchone()[0] != sql.APPLICATION_ID
            or execute("PRAGMA user_version").fetchone()[0] != sql.VERSION
        ):
            raise LockBackendError(
                f"{self.path} is in the place of the lock file, but is not one that this version made: move it away"
            )
        for statement in sql.MEMBERS:  # a file of an earlier version has none
            execute(statement)
        sql.begin_boot(connection)
        execute("COMMIT")
        if empty and self.path:
            place.share(self.database, self.path)

    def close(self) -> None:
        """Close the file; leases need no connection, and the next request opens it again."""
        with self.mutex:
            self._close()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _begin_child(self) -> None:
        """Have a connection of one's own. Nothing is inherited, unless the fork was in C, or did not wait any longer.

        A copy that nobody was using is closed: that frees no lock of the parent, and without it the own one would get
        none, since SQLite takes those of the copy for its own. A copy that was in use cannot be closed.
        """
        idle = self.mutex.acquire(blocking=False)
        self._new_mutex()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if idle:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        else:
            import ctypes  # to keep a reference for ever: also at the interpreter's exit, to close it would hang

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
            self._given_up = self._found[0] if self._found else None


def _before_fork() -> list[Any]:
    """Close all files, and keep them closed: a copy of one in the child spoils what the child opens itself."""
    paused: list[Any] = []
    end = clock.now() + FORK_SECONDS
    if making.acquire(timeout=FORK_SECONDS):
        paused.append(making)
    for file in sorted(_all, key=id):  # in one order, since several threads may fork at once
        if file.mutex.acquire(timeout=max(0.0, end - clock.now())):
            paused.append(file.mutex)
            if file.path:
                with contextlib.suppress(sqlite3.Error):
                    file._close()
    return paused


def _in_parent(paused: list[Any]) -> None:
    for mutex in reversed(paused):
        mutex.release()


def _in_child() -> None:
    global making
    making = threading.RLock()
    sql.now = sql.machine_clock()
    for file in list(_all):
        file._begin_child()


process.on_fork(before=_before_fork, in_parent=_in_parent, in_child=_in_child)
