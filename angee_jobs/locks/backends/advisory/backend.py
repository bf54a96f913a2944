"""Session locks on PostgreSQL: advisory locks on one session of this process's own.

All holds of a process share one session, on which nothing ever blocks; see ``session.py``. Waiters hold a shared
marker lock and listen on a second session; a release notifies only if it cannot take the marker. See
docs/decisions/012-advisory-locks.md.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from hmac import compare_digest
from typing import TYPE_CHECKING, ClassVar

from django.core.exceptions import ImproperlyConfigured

from ... import clock, process
from ...errors import LockBackendError
from ..base import ALONE, MOST_PLACES, BaseLockBackend, Extension, Grant, Record, is_member
from ..postgres import tokens
from ..postgres.errors import NoAnswer, driver_errors, explain
from ..postgres.listener import Listener
from ..postgres.parameters import require_psycopg
from ..postgres.session import Session
from ..postgres.statements import Row
from ..postgres.waited import Waited
from . import members, sql
from .session import HoldSession
from .sql import Asking, Entry, advisory_key

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

#: How long the background thread may spend on the session at a time, in seconds.
BACKGROUND_SECONDS = 0.3
#: How often it is looked whether a process gives up a hold that it was asked for, in seconds.
ASKED_SECONDS = 0.05
#: How often an exclusive waiter leaves word, in seconds, and how long it may sleep between two looks.
WORD_EVERY, FALLBACK = 0.5, 1.0
#: How long a lock of this process may be on its way to or from its holder, in seconds, before it counts as stuck.
OWN_SECONDS = 0.5


class PostgresAdvisoryLockBackend(BaseLockBackend):
    """Session locks on the PostgreSQL database ``alias``: free at once when the holding process dies.

    Needs a direct connection or session pooling. At most 500 holds per process. The session that carries the holds
    closes half a minute after the last one has ended; its death ends them all, which their holders are told. If the
    holder's host vanishes, the server frees its locks within 25 seconds (on a direct connection).

    Example::

        ANGEE_JOBS_LOCKS = {
            "default": {
                "BACKEND": "angee_jobs.locks.PostgresAdvisoryLockBackend",
                "OPTIONS": {"alias": "default"},
            },
        }
    """

    leases: ClassVar[bool] = False
    push = True
    most_places = MOST_PLACES

    def __init__(self, *, alias: str = "default") -> None:
        self.db_alias = alias
        _require_postgres(alias)
        self._reset()
        _backends.add(self)

    def _reset(self) -> None:
        self._holds = HoldSession(self.db_alias)
        self._listener = Listener(self.db_alias, sql.CHANNEL, through_pooler=True)
        self._waited = Waited()
        #: Names that this process has left an exclusive waiter's word for.
        self._words: dict[str, bool] = {}
        #: When a waiter last asked about a name, so that a word is left by those who really wait, and not too often.
        self._asked: dict[str, float] = {}

    @property
    def _session(self) -> HoldSession:
        process.check()  # two children of a fork in C must not share the session of their parent
        return self._holds

    # The operations.

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        asking, ask = Asking(), self._acquire_on
        if is_member(owner):
            entry = Entry(name, advisory_key(owner, "member"), owner, holder, asking)
            entry.gate, ask = advisory_key(name), self._join_on
        else:
            entry = Entry(name, advisory_key(name), owner, holder, asking)
        if not self._session.register(entry, deadline):
            return None
        try:
            row = self._session.run(deadline, lambda session: ask(session, entry, deadline))
        except LockBackendError as error:
            if not error.uncertain:
                self._session.forget(entry)
            raise
        if row is None or row[2] is None:
            self._session.forget(entry)
            return None
        return entry.grant(row)

    def _acquire_on(self, session: Session, entry: Entry, deadline: float) -> Row | None:
        if members.in_the_way(self._session, entry.key):
            return None
        entry.session = session
        try:
            [row] = session.execute(sql.ACQUIRE, [entry.key], deadline, entry.owner)
        except driver_errors() as error:
            try:  # should the lock have been granted before the statement failed, it is held
                if entry.key in self._session.held_on(session, deadline):
                    session.execute(sql.UNLOCK, [entry.key], deadline)
            except NoAnswer:
                raise NoAnswer(sent=True) from error
            explain(error, self.db_alias)
        sql.check_answer(session, row)
        if row[2] is not None and self._words.pop(entry.name, False):
            with contextlib.suppress(NoAnswer, driver_errors()):
                session.execute(sql.UNWANT, [members.word_key(entry.name)], deadline)
        return row

    def _join_on(self, session: Session, entry: Entry, deadline: float) -> Row | None:
        return members.join(self._session, session, entry, deadline)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        self._session.look_after(min(deadline, clock.now() + BACKGROUND_SECONDS))
        entries = list(self._session.entries.values())
        owners = {entry.owner for entry in entries if entry.session is not None and entry.alive}
        return [each.owner for each in extensions if each.owner in owners]

    def release(self, name: str, owner: str, deadline: float) -> bool:
        entries = [self._session.entries.get(advisory_key(name))]
        if is_member(owner):
            entries = [each for each in list(self._session.entries.values()) if each.gate]
        for entry in entries:
            if entry is not None and compare_digest(entry.owner.encode(), owner.encode()):
                return self._session.free(entry, deadline)
        return False

    def inspect(self, name: str, deadline: float) -> Record | None:
        return next(iter(self.inspect_many([name], deadline)), None)

    def inspect_many(self, names: Sequence[str], deadline: float) -> list[Record]:
        records = []
        for name in names:
            own = self._find_here(advisory_key(name))
            records += [own[1]] if own else [each[2] for each in members.found(self._session, name, deadline)]
        return records

    def _find_here(self, key: int) -> tuple[int, Record] | None:
        entry = self._session.entries.get(key)
        if entry is not None and entry.granted and entry.session is not None and entry.alive:
            return entry.session.server_pid, entry.record()
        return None

    def _find(self, name: str, deadline: float) -> tuple[int, Record] | None:
        """The server process that has the exclusive hold of ``name``, and what is known of it."""
        key = advisory_key(name)
        if (own := self._find_here(key)) is not None:
            return own
        rows = self._session.rows(sql.INSPECT, *sql.halves(key), deadline=deadline)
        return (int(rows[0][1] or 0), sql.record(rows[0], name)) if rows else None

    def list_held(self, deadline: float) -> Iterator[Record]:
        rows = self._session.rows(sql.LIST, deadline=deadline)
        entries = list(self._session.entries.values())
        mine = {
            (entry.key, entry.session.server_pid): entry
            for entry in entries
            if entry.granted and entry.session is not None and entry.alive
        }
        for row in rows:
            entry = mine.get((int(row[0] or 0), int(row[1] or 0)))
            yield sql.record(row) if entry is None else entry.record()

    def reap(self, grace: float, batch_size: int, deadline: float) -> int:
        """A dead holder leaves only the row that named it, which is removed here and not counted."""
        self._session.rows(sql.PRUNE, deadline=deadline)
        return 0

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        """Ask the process that holds ``name`` to give it up, which tells its holder the loss.

        LockBackendError if it does not in time: :meth:`end_session` is what is left then.
        """
        key = advisory_key(name)
        look_again = clock.now() + OWN_SECONDS
        while True:
            entry = self._session.entries.get(key)
            if entry is not None and entry.granted:
                if fencing_token not in (None, entry.token):
                    return None
                return entry.record() if self._session.free(entry, deadline) else None
            found = self._find(name, deadline)
            if found is None:
                return self._force_members(name, deadline, fencing_token)
            server_pid, record = found
            own = self._session.pool.slots[0].session
            if own is None or own.server_pid != server_pid or clock.now() >= look_again:
                break
            time.sleep(0.001)  # another thread is just getting it, or giving it up: soon the table knows
        token, published = record.fencing_token, record.fencing_token is not None
        if not published:  # its process knows it
            token = record.fencing_token = fencing_token
        elif fencing_token not in (None, token):
            return None
        self._session.rows(
            sql.ASK, sql.ask_channel(server_pid), f"{key}:{'' if token is None else token}", deadline=deadline
        )
        while (again := self._find(name, deadline)) is not None and again[0] == server_pid:
            if token is not None and again[1].fencing_token not in (None, token):
                # The next hold of the same process; or the one that was not published, and had another token.
                return record if published else None
            if clock.now() + 2 * ASKED_SECONDS >= deadline:
                raise LockBackendError(
                    f"The process that holds {name} did not give it up when it was asked. Its session (server process "
                    f"{server_pid}) can be ended with end_session(), and all its other locks with it",
                    name=name,
                )
            time.sleep(ASKED_SECONDS)
        return record

    def _force_members(self, name: str, deadline: float, fencing_token: int | None) -> Record | None:
        ended = None
        for key, server_pid, record in members.found(self._session, name, deadline):
            token = record.fencing_token
            if fencing_token not in (None, token):
                continue
            entry = self._session.entries.get(key)
            if entry is not None and entry.granted and entry.token == token:
                ended = record if self._session.free(entry, deadline) else ended
                continue
            asked = f"{key}:{'' if token is None else token}"
            self._session.rows(sql.ASK, sql.ask_channel(server_pid), asked, deadline=deadline)
            while any(each[:2] == (key, server_pid) for each in members.found(self._session, name, deadline)):
                if clock.now() + 2 * ASKED_SECONDS >= deadline:
                    raise LockBackendError(f"A process that holds {name} did not give it up when asked", name=name)
                time.sleep(ASKED_SECONDS)
            ended = record
        return ended

    def remaining(self, name: str, deadline: float, places: int = ALONE) -> float | None:
        """Leave the mark that makes a release tell us. None, for only a try can show whether the lock is free now."""
        key = advisory_key(name)
        entry = self._session.entries.get(key)
        if entry is not None and entry.granted and entry.alive:
            return math.inf  # ours: its release wakes the waiters of this process
        self._waited.add(str(key), name)
        self._session.mark(name, deadline)
        asked = clock.now()
        before = self._asked.get(name, -math.inf)
        if asked - before > 2 * WORD_EVERY + FALLBACK:
            if len(self._asked) > 1000:
                self._asked.clear()
            self._asked[name] = asked
        elif places == ALONE and asked - before >= WORD_EVERY:
            self._asked[name] = asked
            if members.leave_word(self._session, name, key, deadline):
                self._words[name] = True
        return None

    def wait_for_change(self, seconds: float) -> Collection[str] | None:
        heard = self._listener.wait(seconds)
        return None if heard is None else self._waited.names(heard)

    def stop_watching(self) -> None:
        self._listener.stop()
        self._session.unmark_all()

    def close(self) -> None:
        self._session.pool.close()

    def check_database(self, databases: Collection[str]) -> list[CheckMessage]:
        from ..postgres.checks import check_postgres

        needs = (tokens.SEQUENCE, "angee_jobs_sessionhold")
        return check_postgres(self.db_alias, needs, databases, sql.refuse_transaction_pooling)

    # By force.

    def holds_beside(self, name: str, deadline: float) -> tuple[int, list[Record]] | None:
        """The server process that holds ``name``, and all the holds that would end with its session.

        For :meth:`end_session`, which takes that process; None if ``name`` is free.
        """
        found = self._find(name, deadline)
        if found is None:
            return None
        rows = self._session.rows(sql.LIST_SESSION, found[0], deadline=deadline)
        return found[0], [sql.record(row) for row in rows]

    def end_session(self, name: str, server_pid: int, deadline: float) -> bool:
        """End the session that holds ``name``, and every hold on it; False if ``server_pid`` does not hold it now.

        Needs the right to call ``pg_terminate_backend``. The holders are told the loss within two seconds.
        """
        found = self._find(name, deadline)
        if found is None or found[0] != server_pid:
            return False
        return self._session.rows(sql.TERMINATE, server_pid, deadline=deadline) == [(b"t",)]


def _require_postgres(alias: str) -> None:
    """ImproperlyConfigured if the backend cannot work on ``alias``."""
    from django.db import connections
    from django.utils.connection import ConnectionDoesNotExist

    try:
        vendor = connections[alias].vendor
    except (ConnectionDoesNotExist, TypeError) as error:
        raise ImproperlyConfigured(
            f"PostgresAdvisoryLockBackend: there is no database {alias!r}; "
            f"DATABASES has {', '.join(map(repr, connections))}."
        ) from error
    if vendor != "postgresql":
        raise ImproperlyConfigured(
            f"PostgresAdvisoryLockBackend works on PostgreSQL, and the database {alias!r} is {vendor}. "
            f"Use TableLockBackend on SQLite, or RedisLockBackend."
        )
    require_psycopg(alias)


_backends: weakref.WeakSet[PostgresAdvisoryLockBackend] = weakref.WeakSet()


def _after_fork() -> None:
    """The holds and the session are the parent's; the child begins with none."""
    for backend in list(_backends):
        backend._reset()


process.on_fork(in_child=_after_fork)
