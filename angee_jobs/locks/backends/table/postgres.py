"""The lock table on PostgreSQL: rows of :class:`~angee_jobs.models.TaskLock`, one request per operation.

A released row stays, free, so that the next grant is an update in place that sees the last fencing token; reaping,
and the backend itself every so often, remove the rows that were not used for a while. See
docs/decisions/010-lock-table-rows.md.

A try that is refused writes nothing. One that may win waits for the row's lock at most ``ROW_SECONDS``, since a
stranger's transaction may have it. All times are ``clock_timestamp()``: ``now()`` is when the transaction began.

Late requests: a middlebox that resets the client's side of a connection may deliver its last request afterwards. No
operation but ``acquire`` does anything then, for owner ids are never used twice. A late ``acquire`` is refused while
another holds the lock. If the lock is free, the key is held by an owner that is gone, for its ttl and no longer, since
nothing renews it; ``force_release`` frees it at once. On its own live hold it only raises the token in the row.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ... import clock, process
from ...errors import LockBackendError
from ...keys import name_digest
from ..base import (
    ALONE,
    MOST_PLACES,
    WANTED_SECONDS,
    Extension,
    Grant,
    Record,
    extend_each_kind,
    is_member,
    owner_digest,
    places_of,
)
from ..postgres import tokens
from ..postgres.errors import RowLocked, refused
from ..postgres.listener import Listener
from ..postgres.parameters import require_psycopg
from ..postgres.pool import Pool
from ..postgres.statements import Parameter, Row, Statement, milliseconds, number
from ..postgres.waited import Waited
from . import TableLockBackend
from . import postgres_places as members
from . import postgres_rows as form
from . import postgres_sql as sql

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

#: At most so many sessions of a process; several, because commits that are made at once share one write of the log.
SESSIONS = 4
#: A request waits at most this long for the lock of a row, in seconds, and at most this share of its time.
ROW_SECONDS, ROW_SHARE = 1.0, 0.6
#: A grant that took longer than this was not one, in seconds: see the decision record.
GRANT_SECONDS = 30.0
#: After so many releases, some rows are looked at and removed if they are free and idle.
TIDY_EVERY = 2000
#: A pass of the reaper that began so long ago was broken off, in seconds.
PASS_SECONDS = 600.0
#: Behind a pooler, all the keys that are waited for are looked at in one request, first after ``POLL_FASTEST`` seconds
#: and then, while nothing happens, ever more seldom.
POLL_FASTEST, POLL_SLOWEST, POLL_GROWTH = 0.01, 0.2, 1.3


def _row_timeout(deadline: float) -> str:
    """How long a statement that has until ``deadline`` may wait for a row, as ``lock_timeout`` wants it."""
    return milliseconds(min(ROW_SECONDS, (deadline - clock.now()) * ROW_SHARE))


class PostgresTableLockBackend(TableLockBackend):
    """What ``TableLockBackend`` is on a PostgreSQL alias.

    On a direct connection a waiter is told of a release by a notification. Through a pooler, which delivers none,
    ``push`` turns False and one request per process looks after all the keys that it waits for, 5 to 100 times a
    second.
    """

    most_places = MOST_PLACES

    def __init__(self, *, alias: str = "default", ttl: Any = 30) -> None:
        super().__init__(alias=alias, ttl=ttl)
        require_psycopg(alias)
        self._reset()
        _backends.add(self)

    def _reset(self) -> None:
        self._pool = Pool(self.db_alias, SESSIONS, fallback_application_name="angee_jobs table")
        #: When the leases of this process end on its own clock, by the digests of their owners.
        self._leases: dict[str, float] = {}
        self._pool.kept = self._has_leases
        self._listener = Listener(self.db_alias, sql.CHANNEL)
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._until_tidy = TIDY_EVERY
        self._reaped_to, self._pass_began = "", 0.0
        self._waited = Waited()  # by digest
        self._poll_pause = POLL_FASTEST
        self._seen: dict[str, int] = {}  # how many members had each key that is polled for

    @property
    def push(self) -> bool:  # type: ignore[override]
        return self._pool.direct is not False

    def _rows(
        self, statement: Statement, *parameters: Parameter, deadline: float, owner: str = "", again: bool = True
    ) -> list[Row]:
        # Nearly every operation may be sent twice, should the connection die before the answer.
        return self._pool.run(statement, parameters, deadline, owner=owner, again=again)

    # The operations.

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        return self._acquire(sql.ACQUIRE, name, owner, ttl, holder, deadline)

    def acquire_next(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        return self._acquire(sql.ACQUIRE_NEXT, name, owner, ttl, holder, deadline)

    def _acquire(
        self, statement: Statement, name: str, owner: str, ttl: float, holder: str, deadline: float
    ) -> Grant | None:
        if is_member(owner):  # the lock of its gate is never kept for long
            return self._enter(name, owner, ttl, holder, deadline)
        started = clock.now()
        digest, hashed = name_digest(name), owner_digest(owner)
        try:
            rows = self._rows(
                statement, digest, name, hashed, holder, ttl, _row_timeout(deadline), deadline=deadline, owner=hashed
            )
        except RowLocked:
            if self.inspect(name, deadline) is not None:
                return None
            raise
        return self._granted(rows, name, hashed, ttl, started)

    def _enter(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        started = clock.now()
        digest, hashed, places = name_digest(name), owner_digest(owner), form.among(places_of(owner))
        try:
            rows = self._rows(
                members.ENTER, digest, name, hashed, _row_timeout(deadline), places, holder, ttl,
                deadline=deadline, owner=hashed,
            )  # fmt: skip
        except RowLocked:
            if self._rows(members.LEFT, digest, places, deadline=deadline):
                return None
            raise
        return self._granted(rows, name, hashed, ttl, started)

    def _granted(self, rows: list[Row], name: str, hashed: str, ttl: float, started: float) -> Grant | None:
        if clock.now() - started > GRANT_SECONDS:
            raise LockBackendError(f"The grant of {name} came too late to count", name=name, uncertain=True)
        if rows:
            self._leases[hashed] = started + ttl
        return form.grant(rows)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        return extend_each_kind(
            extensions,
            lambda batch: self._extend(sql.EXTEND, batch, deadline),
            lambda batch: self._extend(members.EXTEND, batch, deadline),
        )

    def _extend(self, statement: Statement, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        owners = {owner_digest(each.owner): each.owner for each in extensions}
        try:
            rows = self._rows(
                statement,
                form.array([name_digest(each.name) for each in extensions]),
                form.array(owners),
                form.array([each.ttl for each in extensions]),
                _row_timeout(deadline),
                deadline=deadline,
            )
        except RowLocked as locked:
            if len(extensions) == 1:
                raise
            return self._extend_singly(extensions, deadline, locked)
        extended = [row[0].decode() for row in rows if row[0]]
        ends = {owner_digest(each.owner): clock.now() + each.ttl for each in extensions}
        self._leases.update((hashed, ends[hashed]) for hashed in extended)
        return [owners[hashed] for hashed in extended]

    def _extend_singly(self, extensions: Sequence[Extension], deadline: float, locked: RowLocked) -> Collection[str]:
        """A stranger has locked one row: it must not take the others with it."""
        extended: list[str] = []
        failed = False
        for each in extensions:
            # A short wait for each, so that one row that is stuck leaves time for the others.
            limit = min(deadline, clock.now() + ROW_SECONDS / 4)
            try:
                extended += self.extend([each], limit)
            except LockBackendError:  # that row is locked, or there was no answer in time; either takes no other along
                failed = True
        if failed:
            locked.extended = extended
            raise locked
        return extended

    def release(self, name: str, owner: str, deadline: float) -> bool:
        hashed = owner_digest(owner)
        self._pool.drain(hashed, deadline)  # or a grant that was given up waiting for could come after this
        digest, wait = name_digest(name), _row_timeout(deadline)
        if is_member(owner):
            rows = self._end(members.LEAVE, members.LEAVE_SILENTLY, digest, wait, hashed, deadline=deadline)
        else:
            rows = self._end(sql.RELEASE, sql.RELEASE_SILENTLY, digest, hashed, wait, deadline=deadline)
        self._leases.pop(hashed, None)
        self._until_tidy -= 1
        if self._until_tidy <= 0:
            self._until_tidy = TIDY_EVERY
            self._tidy(min(deadline, clock.now() + 1.0))
        return bool(rows)

    def adopt(self, name: str, owner: str, new_owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        digest, hashed, new, wait = (
            name_digest(name),
            owner_digest(owner),
            owner_digest(new_owner),
            _row_timeout(deadline),
        )
        statement, parameters = sql.ADOPT, (digest, hashed, new, holder, str(ttl), wait)
        if is_member(owner):
            statement, parameters = members.ADOPT, (digest, wait, hashed, new, holder, str(ttl))
        return form.grant(self._rows(statement, *parameters, deadline=deadline, owner=new, again=False))

    def inspect(self, name: str, deadline: float) -> Record | None:
        rows = self._rows(members.INSPECT, name_digest(name), deadline=deadline)
        return form.record(rows[0]) if rows else None

    def list_held(self, deadline: float) -> Iterator[Record]:
        # First which there are, in one scan: to walk through the dead in the order of the digests takes far longer.
        seconds = deadline - clock.now()
        digests = [(row[0] or b"").decode() for row in self._rows(sql.DIGESTS, deadline=deadline)]
        for at in range(0, len(digests), sql.PAGE_ROWS):
            page = form.array(digests[at : at + sql.PAGE_ROWS])
            yield from map(form.record, self._rows(members.HELD, page, deadline=clock.now() + seconds))

    def scan_held(self, fields: Sequence[str], deadline: float) -> Iterator[Sequence[tuple[Any, ...]]]:
        rows = self._rows(members.scan(tuple(fields)), deadline=deadline)
        readers = [form.text, *(form.READERS.get(field, number) for field in fields)]
        for at in range(0, len(rows), sql.PAGE_ROWS):
            columns = zip(*rows[at : at + sql.PAGE_ROWS], strict=True)
            yield list(zip(*(map(read, column) for read, column in zip(readers, columns, strict=True)), strict=True))

    def inspect_many(self, names: Sequence[str], deadline: float) -> list[Record]:
        return [*map(form.record, self._rows(members.HELD, form.array([*map(name_digest, names)]), deadline=deadline))]

    def list_expired(self, grace: float, deadline: float) -> Iterator[Record]:
        # One short statement per page, so that a slow reader keeps no snapshot. Each has as long as the first.
        seconds = deadline - clock.now()
        for statement, first in ((sql.EXPIRED, [""]), (members.EXPIRED, ["", str(members.WORD)])):
            after = first
            while rows := self._rows(statement, *after, grace, deadline=clock.now() + seconds):
                yield from (form.record(row[len(first) :]) for row in rows)
                if len(rows) < sql.PAGE_ROWS:
                    break
                after = [form.text(each) for each in rows[-1][: len(first)]]

    def reap(self, grace: float, batch_size: int, deadline: float) -> int:
        # From where the last batch ended: the next one need not pass again what lives, or was removed, before it. So
        # one pass removes what had expired when it began; one that was broken off long ago is followed by another.
        if not self._reaped_to:
            self._pass_began = clock.now()
        removed = self._reap(grace, batch_size, deadline)
        if removed < batch_size and clock.now() - self._pass_began > PASS_SECONDS:
            self._reaped_to = ""
            removed += self._reap(grace, batch_size - removed, deadline)
        if removed < batch_size:
            removed += form.count(self._rows(members.REAP, grace, batch_size - removed, deadline=deadline, again=False))
        if removed < batch_size:
            self._reaped_to = ""
            half = (clock.now() + deadline) / 2
            with contextlib.suppress(LockBackendError):  # what was reaped counts, and the idle can wait
                for sweep in (sql.SWEEP, members.SWEEP):
                    swept = batch_size
                    while swept == batch_size and clock.now() < half:
                        swept = form.count(self._rows(sweep, batch_size, deadline=deadline))
        return removed

    def _reap(self, grace: float, limit: int, deadline: float) -> int:
        rows = self._rows(sql.REAP, grace, limit, self._reaped_to, deadline=deadline, again=False)
        self._reaped_to = (rows[0][1] or b"").decode()
        return form.count(rows)

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        rows = self._end(
            members.FORCE, members.FORCE_SILENTLY, name_digest(name), _row_timeout(deadline), fencing_token,
            deadline=deadline,
        )  # fmt: skip
        return form.record(rows[0]) if rows else None

    def remaining(self, name: str, deadline: float, places: int = ALONE) -> float | None:
        digest, wait = name_digest(name), _row_timeout(deadline)
        self._waited.add(digest, name)
        if places == ALONE:
            rows = self._rows(sql.LEFT, digest, deadline=deadline)
        else:
            rows = self._rows(members.LEFT, digest, form.among(places), deadline=deadline)
        if not rows:
            return None
        left, waited, gate = number(rows[0][0]), number(rows[0][1]), rows[0][2:] == (b"t",)
        try:
            if gate:
                wanted = min(WANTED_SECONDS, deadline - clock.now())
                self._rows(members.WANT, digest, wanted, wait, deadline=deadline)
            if not self.push or (waited is not None and waited >= sql.WAITED_ANEW):
                return left
            if places == ALONE:
                rows = self._rows(sql.MARK, digest, wait, deadline=deadline)
            else:
                rows = self._rows(members.MARK, digest, form.among(places), wait, deadline=deadline)
        except LockBackendError as error:
            if refused(error):  # a locked row, or a full disk: the wait goes on at the fallback interval
                return left
            raise
        return number(rows[0][0]) if rows else None

    def wait_for_change(self, seconds: float) -> Collection[str] | None:
        if self.push:
            heard = self._listener.wait(seconds)
            return None if heard is None else self._waited.names(heard)
        return self._poll(seconds)

    def stop_watching(self) -> None:
        self._listener.stop()
        self._wake.put(None)

    def close(self) -> None:
        self._pool.close()

    def check_database(self, databases: Collection[str]) -> list[CheckMessage]:
        from ..postgres.checks import check_postgres

        return check_postgres(self.db_alias, (tokens.SEQUENCE, sql.TABLE, members.MEMBERS), databases, None)

    # Inside.

    def _end(self, statement: Statement, silent: Statement, *parameters: Parameter, deadline: float) -> list[Row]:
        """End a hold; without notifying the waiters if that is what the server refuses. They look again soon."""
        try:
            return self._rows(statement, *parameters, deadline=deadline, again=False)
        except LockBackendError as error:
            if isinstance(error, RowLocked) or not refused(error):
                raise
        return self._rows(silent, *parameters, deadline=deadline, again=False)

    def _has_leases(self) -> bool:
        """Whether one that was granted or extended here may be alive: then a session is kept for its renewal."""
        now = clock.now()
        for hashed, end in list(self._leases.items()):
            if end <= now:
                self._leases.pop(hashed, None)
        return bool(self._leases)

    def _poll(self, seconds: float) -> Collection[str]:
        """Look at all the keys that are waited for, until one is free or ``seconds`` are over."""
        end = clock.now() + seconds
        while (left := end - clock.now()) > 0:
            try:
                self._wake.get(timeout=min(self._poll_pause, left))
                break  # there are no waiters any more
            except queue.Empty:
                pass
            names = self._waited.recent()
            rows = self._rows(members.STILL_HELD, form.array(names), deadline=clock.now() + max(left, 1.0))
            held = {form.text(row[0]): row[1] for row in rows}
            seen, self._seen = self._seen, {each: int(count) for each, count in held.items() if count is not None}
            # Where members hold it, there may be room when they are fewer than they were, or were not there.
            fewer = {each for each, count in self._seen.items() if count < seen.get(each, count + 1)}
            if free := [name for digest, name in names.items() if digest not in held or digest in fewer]:
                self._poll_pause = POLL_FASTEST
                return free
            self._poll_pause = min(self._poll_pause * POLL_GROWTH, POLL_SLOWEST)
        return ()

    def _tidy(self, deadline: float) -> None:
        """Remove idle rows among some that follow a random digest: a bounded, fair sample, however large the table."""
        try:
            for tidy in (sql.TIDY, members.TIDY):
                self._rows(tidy, secrets.token_hex(32), deadline=deadline)
        except LockBackendError:
            pass  # a matter of size only; the next one comes soon


_backends: weakref.WeakSet[PostgresTableLockBackend] = weakref.WeakSet()


def _begin_child() -> None:
    """The sessions and the waiters are the parent's; the child begins with none."""
    for backend in list(_backends):
        backend._reset()


process.on_fork(in_child=_begin_child)
