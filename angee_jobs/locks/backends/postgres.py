"""Session locks on PostgreSQL: advisory locks on one session of this process's own.

All holds of a process share one session, on which nothing ever blocks. The server would grant a lock of that session
a second time, so :attr:`PostgresAdvisoryLockBackend._holds` is asked first: a hold has its entry there from before
the request until its release was answered. The session is not dropped because a request was interrupted or late, for
that would end all the other holds: the answer is read, and an unwanted grant undone, when the session is used next.

Waiters hold a shared marker lock and listen on a second session; a release notifies only if it cannot take the
marker. See docs/decisions/012-advisory-locks.md.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.core.exceptions import ImproperlyConfigured

from .. import clock, process
from ..errors import LockBackendError
from . import pg_advisory as sql
from .base import BaseLockBackend, Extension, Grant, Record
from .pg import NoAnswer, Parameter, Row, Session, SessionLost, Statement, in_test_run, require_psycopg
from .pg_advisory import Entry, advisory_key, marker_key
from .pg_listen import Listener
from .pg_pool import Pool, driver_error, explain

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

logger = logging.getLogger("angee_jobs.locks")

#: At most so many holds of one process: the server's table of locks is shared by all its databases, and when it is
#: full, other people's queries fail. For more holds, use leases.
MAX_HOLDS = 500
#: What is done in the background may keep the renewal thread for this long, in seconds.
CHORE_SECONDS = 0.3
#: How often, in seconds, notes of holds whose session has died are removed; and when a mark is given up that nobody
#: has asked for.
PRUNE_EVERY, MARK_SECONDS = 60.0, 5.0

T = TypeVar("T")


class PostgresAdvisoryLockBackend(BaseLockBackend):
    """Session locks on the PostgreSQL database ``alias``: free at once when the holding process dies.

    Needs a direct connection or session pooling. At most 500 holds per process. The session that carries the holds
    closes half a minute after the last one has ended; its death ends them all, which their holders are told.

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

    def __init__(self, *, alias: str = "default") -> None:
        self.db_alias = alias
        _require_postgres(alias)
        self._reset()
        _backends.add(self)

    def _reset(self) -> None:
        self._pool = Pool(
            self.db_alias,
            1,
            shared=True,
            settings=sql.SERVER_SETTINGS,
            forced={"application_name": sql.APPLICATION},
            **sql.CLIENT_SETTINGS,
        )
        self._pool.in_use = lambda: bool(self._holds or self._marks)
        self._listener = Listener(self.db_alias, sql.CHANNEL, through_pooler=True)
        self._holds: dict[int, Entry] = {}
        #: The markers of the keys that are waited for: on which session, and when they were last asked for.
        self._marks: dict[int, tuple[Session, float]] = {}
        self._waited: dict[str, str] = {}
        self._unwanted_marks: list[tuple[int, Session]] = []
        self._doubtful = False
        self._next_prune = self._next_publish = 0.0

    # The verbs.

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        key = advisory_key(name)
        entry = Entry(name, key, owner, holder)
        pause = 0.0002
        while (present := self._holds.setdefault(key, entry)) is not entry:
            if not present.alive:
                self._drop(present)
            elif present.granted or self._pool.interrupted_here:
                return None
            elif clock.now() >= deadline:
                raise LockBackendError(f"An earlier try for {name} has still not been answered", name=name)
            else:
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
        if len(self._holds) > MAX_HOLDS:
            self._drop(entry)
            raise LockBackendError(
                f"This process holds {MAX_HOLDS} session locks already, the most that it may (the server's table of "
                f"locks is shared by all its databases): use TableLockBackend for so many",
                name=name,
            )
        try:
            row = self._on_session(deadline, lambda session: self._acquire_on(session, entry, deadline))
        except LockBackendError as error:
            if not error.uncertain:
                self._drop(entry)
            raise
        assert row is not None
        if row[2] is None:
            self._drop(entry)
            self._close_if_idle()
            return None
        return entry.grant(row)

    def _acquire_on(self, session: Session, entry: Entry, deadline: float) -> Row:
        entry.session = session
        try:
            [row] = session.execute(sql.ACQUIRE, [entry.key], deadline, entry.owner)
        except _driver_errors() as error:
            try:  # should the lock have been granted before the statement failed, it is held
                if entry.key in self._held_on(session, deadline):
                    session.execute(sql.UNLOCK, [entry.key], deadline)
            except NoAnswer:
                raise NoAnswer(sent=True) from error
            explain(error, self.db_alias)
        if row[2] == b"-1":
            raise LockBackendError(f"The database {self.db_alias!r} is read-only here, and fencing tokens need writing")
        if not session.direct and int(row[0] or 0) != session.server_pid:
            raise sql.pooling_error(self.db_alias)
        return row

    def _held_on(self, session: Session, deadline: float) -> set[int]:
        """The keys that the server says this session holds."""
        return {int(row[0] or 0) for row in session.execute(sql.MINE, [], deadline)}

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        self._chores(min(deadline, clock.now() + CHORE_SECONDS))
        owners = {entry.owner for entry in list(self._holds.values()) if entry.session is not None and entry.alive}
        return [each.owner for each in extensions if each.owner in owners]

    def release(self, name: str, owner: str, deadline: float) -> bool:
        entry = self._holds.get(advisory_key(name))
        if entry is None or entry.owner != owner:
            return False
        released = entry.session is not None and self._release(entry, deadline)
        self._drop(entry)
        self._close_if_idle()
        return released

    def _release(self, entry: Entry, deadline: float) -> bool:
        def work(session: Session) -> bool:
            if session is not entry.session:
                return False
            if entry.unlocking is not None:  # an earlier try, which was not waited for
                session.settle(deadline)
                if any(result.ntuples and result.get_value(0, 1) == b"t" for result in entry.unlocking.results):
                    return True
                entry.unlocking = None
            parameters = [entry.key, marker_key(entry.name)]
            try:
                if entry.published:
                    try:
                        [row] = session.execute(sql.RELEASE_PUBLISHED, parameters, deadline, entry.owner)
                        return row[1] == b"t"
                    except _driver_errors():  # about the note; the lock may be free already, and must be
                        if entry.key not in self._held_on(session, deadline):
                            return True
                [row] = session.execute(sql.RELEASE, parameters, deadline, entry.owner)
                return row[1] == b"t"
            except BaseException:
                if session.busy:
                    entry.unlocking = session.pending
                raise

        return bool(self._on_session(deadline, work, only=entry.session))

    def inspect(self, name: str, deadline: float) -> Record | None:
        found = self._find(name, deadline)
        return found[1] if found is not None else None

    def _find(self, name: str, deadline: float) -> tuple[int, Record] | None:
        """The server process that holds ``name``, and what is known of the hold."""
        key = advisory_key(name)
        entry = self._holds.get(key)
        if entry is not None and entry.granted and entry.session is not None and entry.alive:
            return entry.session.server_pid, entry.record()
        rows = self._rows(sql.INSPECT, *sql.halves(key), deadline=deadline)
        return (int(rows[0][1] or 0), sql.record(rows[0], name)) if rows else None

    def list_held(self, deadline: float) -> Iterator[Record]:
        rows = self._rows(sql.LIST, deadline=deadline)
        mine = {str(key).encode(): entry for key, entry in list(self._holds.items()) if entry.granted and entry.alive}
        for row in rows:
            entry = mine.get(row[0] or b"")
            pid = entry.session.server_pid if entry is not None and entry.session is not None else 0
            yield entry.record() if entry is not None and pid == int(row[1] or 0) else sql.record(row)

    def reap(self, grace: float, batch_size: int, deadline: float) -> int:
        """Nothing is left of a dead holder but its note, which is removed here and not counted."""
        self._rows(sql.PRUNE, deadline=deadline)
        return 0

    def force_release(self, name: str, deadline: float) -> Record | None:
        """Ask the process that holds ``name`` to give it up, which tells its holder the loss.

        LockBackendError if it does not in time: :meth:`end_session` is what is left then.
        """
        entry = self._holds.get(advisory_key(name))
        if entry is not None and entry.granted:
            return entry.record() if self._give_up(entry, deadline) else None
        found = self._find(name, deadline)
        if found is None:
            return None
        server_pid, record = found
        self._rows(sql.ASK, sql.ask_channel(server_pid), advisory_key(name), deadline=deadline)
        while (again := self._find(name, deadline)) is not None and again[0] == server_pid:
            if clock.now() + 0.1 >= deadline:
                raise LockBackendError(
                    f"The process that holds {name} did not give it up when it was asked. Its session (server process "
                    f"{server_pid}) can be ended with end_session(), and all its other locks with it",
                    name=name,
                )
            time.sleep(0.05)
        return record

    def _give_up(self, entry: Entry, deadline: float) -> bool:
        """Free a hold of this process. Its lock learns of it from ``extend``, as of any loss."""
        ended = self._release(entry, deadline)
        self._drop(entry)
        self._close_if_idle()
        return ended

    def remaining(self, name: str, deadline: float) -> float | None:
        """Leave the mark that makes a release tell us. None, for only a try can show whether the lock is free now."""
        key = advisory_key(name)
        entry = self._holds.get(key)
        if entry is not None and entry.granted and entry.alive:
            return float("inf")  # ours: its release rings in this process
        marker = marker_key(name)
        self._waited[str(key)] = name

        def mark(session: Session) -> None:
            if (marker, session) in self._unwanted_marks:
                self._unwanted_marks.remove((marker, session))
            elif self._marks.get(marker, (None, 0.0))[0] is not session:
                session.execute(sql.MARK, [marker], deadline)
            self._marks[marker] = (session, clock.now())
            self._unmark(session, deadline)

        self._on_session(deadline, mark)
        return None

    def wait_for_change(self, seconds: float) -> Collection[str] | None:
        heard = self._listener.wait(seconds)
        return None if heard is None else [self._waited[key] for key in heard if key in self._waited]

    def stop_watching(self) -> None:
        self._listener.stop()
        self._waited.clear()
        while self._marks:
            marker, (session, _) = self._marks.popitem()
            self._unwanted_marks.append((marker, session))  # given back in the background
        if not self._holds:
            self._pool.close_idle(0)

    def close(self) -> None:
        self._pool.close()

    def check_database(self, databases: Collection[str]) -> list[CheckMessage]:
        from .pg_checks import check_postgres

        needs = ("angee_jobs_fencing_token", "angee_jobs_sessionhold")
        return check_postgres(self.db_alias, needs, databases, sql.refuse_transaction_pooling)

    # By force.

    def holds_beside(self, name: str, deadline: float) -> tuple[int, list[Record]] | None:
        """The server process that holds ``name``, and all the holds that would end with its session.

        For :meth:`end_session`, which takes that process; None if nobody holds ``name``.
        """
        found = self._find(name, deadline)
        if found is None:
            return None
        rows = self._rows(sql.LIST_SESSION, found[0], deadline=deadline)
        return found[0], [sql.record(row) for row in rows]

    def end_session(self, name: str, server_pid: int, deadline: float) -> bool:
        """End the session that holds ``name``, and every hold on it; False if ``server_pid`` does not hold it now.

        Needs the right to call ``pg_terminate_backend``. The holders are told the loss within two seconds.
        """
        found = self._find(name, deadline)
        if found is None or found[0] != server_pid:
            return False
        return self._rows(sql.TERMINATE, server_pid, deadline=deadline) == [(b"t",)]

    # The session.

    def _on_session(self, deadline: float, work: Callable[[Session], T], only: Session | None = None) -> T | None:
        """Run ``work`` on the session that carries the holds, alone. With ``only``: None if that session is gone."""
        while True:
            try:
                claim = self._pool.claim(deadline)
            except NoAnswer as error:
                raise self._pool.no_answer(error) from driver_error(error)
            slot = claim.slot
            try:
                if only is None:
                    return work(self._opened(slot, deadline))
                return work(only) if slot.session is only else None
            except SessionLost as error:
                slot.drop()
                if only is not None:
                    return None
                if error.sent:
                    raise LockBackendError(
                        f"The connection to the database {self.db_alias!r} was lost: {error}", uncertain=True
                    ) from driver_error(error)
            except NoAnswer as error:
                self._doubtful = True
                raise self._pool.no_answer(error) from driver_error(error)
            except _driver_errors() as error:
                explain(error, self.db_alias)
            except BaseException:
                self._doubtful = True
                raise
            finally:
                claim.give_back()

    def _opened(self, slot: Any, deadline: float) -> Session:
        before = slot.session
        if before is not None and not before.open:
            slot.drop()
        session = self._pool.opened(slot, deadline)
        if session is not before:
            try:
                if session.in_recovery:
                    raise LockBackendError(
                        f"The database {self.db_alias!r} is a read-only replica, where nothing can be locked: use an "
                        f"alias of the primary server"
                    )
                if not session.direct:
                    sql.refuse_transaction_pooling(session, deadline)
                session.execute(Statement(f"LISTEN {sql.ask_channel(session.server_pid)}"), [], deadline)
            except BaseException:
                slot.drop()
                raise
        return session

    def _rows(self, statement: Statement, *parameters: Parameter, deadline: float) -> list[Row]:
        rows = self._on_session(deadline, lambda session: session.execute(statement, parameters, deadline))
        self._close_if_idle()
        return rows or []

    def _drop(self, entry: Entry) -> None:
        if self._holds.get(entry.key) is entry:
            self._holds.pop(entry.key, None)

    def _close_if_idle(self) -> None:
        if not self._holds and in_test_run():
            self._pool.close_idle(0)

    # In the background, on the renewal thread.

    def _chores(self, deadline: float) -> None:
        """Hear what the session has to say, and put the server's picture and ours in accord."""
        session = self._pool.slots[0].session
        if session is None:
            return
        try:
            self._on_session(deadline, lambda session: self._look_after(session, deadline), only=session)
        except LockBackendError as error:
            logger.debug("The session of the locks on %r: %s", self.db_alias, error)

    def _look_after(self, session: Session, deadline: float) -> None:
        session.settle(deadline)
        if not session.look():
            raise SessionLost("the server has closed the connection", sent=False)
        heard, session.notifications = session.notifications, []
        for _, payload in heard:
            entry = self._holds.get(int(payload)) if payload.lstrip("-").isdigit() else None
            if entry is not None and entry.granted:
                logger.warning("The lock %s is given up because somebody asked for it by force", entry.name)
                self._give_up(entry, deadline)
        if self._doubtful:
            self._sweep(session, deadline)
        self._unmark(session, deadline)
        self._publish(session, deadline)

    def _sweep(self, session: Session, deadline: float) -> None:
        """After an interruption: free what is held but not wanted, and find what is wanted but not held."""
        held = self._held_on(session, deadline)
        for key in held - self._holds.keys():
            session.execute(sql.UNLOCK, [key], deadline)
        for entry in list(self._holds.values()):
            if entry.granted and entry.session is session and entry.key not in held:
                self._drop(entry)
        self._doubtful = False

    def _unmark(self, session: Session, deadline: float) -> None:
        for marker, (on, asked) in list(self._marks.items()):
            if clock.now() - asked > MARK_SECONDS:
                self._marks.pop(marker, None)
                self._unwanted_marks.append((marker, on))
        if self._unwanted_marks:
            unwanted, self._unwanted_marks = self._unwanted_marks, []
            markers = ",".join(str(marker) for marker, on in unwanted if on is session)
            session.execute(sql.UNMARK, ["{" + markers + "}"], deadline)

    def _publish(self, session: Session, deadline: float) -> None:
        now = clock.now()
        old = [
            entry
            for entry in list(self._holds.values())
            if entry.granted and not entry.published and now - entry.granted >= sql.PUBLISH_SECONDS
        ]
        if not old or now < self._next_publish:
            return
        try:
            session.execute(sql.PUBLISH, [sql.notes(old)], deadline)
            for entry in old:
                entry.published = True
            if now >= self._next_prune:
                self._next_prune = now + PRUNE_EVERY
                session.execute(sql.PRUNE, [], deadline)
        except _driver_errors() as error:
            self._next_publish = now + PRUNE_EVERY  # the locks themselves do not need it
            logger.warning("The holders of session locks on %r cannot be published: %s", self.db_alias, error)


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


def _driver_errors() -> Any:
    from psycopg import Error

    return Error


_backends: weakref.WeakSet[PostgresAdvisoryLockBackend] = weakref.WeakSet()


def _after_fork() -> None:
    """The holds and the session are the parent's; the child begins with none."""
    for backend in list(_backends):
        backend._reset()


process.on_fork(in_child=_after_fork)
