"""The session that carries all advisory locks of this process, and the process's own table of them.

The server would grant a lock to that session a second time, so the table is asked first: a hold has its entry there
from before the request until its release was answered. The session is not dropped because a request was interrupted
or late, for that would end all the other holds: the answer is read, and an unwanted grant undone, when the session is
used next.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import TypeVar

from ... import clock
from ...errors import LockBackendError
from ...log import logger
from ..postgres.errors import CannotConnect, NoAnswer, SessionLost, driver_error, driver_errors, explain, refused
from ..postgres.pool import Pool
from ..postgres.session import Session
from ..postgres.slots import Slot
from ..postgres.statements import Parameter, Row, Statement
from . import members, sql
from .sql import Entry, marker_key

#: At most so many holds of one process: the server's table of locks is shared by all its databases, and when it is
#: full, other people's queries fail. For more holds, use leases.
MAX_HOLDS = 500
#: How often, in seconds, notes of holds whose session has died are removed; and when a mark is given up that no waiter
#: has asked for.
PRUNE_EVERY, MARK_SECONDS = 60.0, 5.0

#: What is heard from who wants a hold by force; anybody may say anything on that channel.
_ASKED = re.compile(r"(-?[0-9]{1,20}):([0-9]*):([0-9]+(?:\.[0-9]+)?)")

T = TypeVar("T")


class HoldSession:
    """See the module. Opened when it is needed, closed when it has carried nothing for a while."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.pool = Pool(
            alias,
            1,
            shared=True,
            settings=sql.SERVER_SETTINGS,
            forced={"application_name": sql.APPLICATION},
            **sql.CLIENT_SETTINGS,
        )
        self.pool.in_use = lambda: bool(self.entries or self._marks)
        #: By advisory key.
        self.entries: dict[int, Entry] = {}
        #: Keys that are held in share mode, and whether the server may have counted one too often.
        self.gates: dict[int, bool] = {}
        #: Set when a request was interrupted: what the server holds may differ from the entries.
        self.doubtful = False
        #: The markers of the keys that are waited for: on which session, and when they were last asked for.
        self._marks: dict[int, tuple[Session, float]] = {}
        self._unwanted_marks: list[tuple[int, Session]] = []
        self._sessions_proven = False
        self._ready: Session | None = None
        self._next_prune = self._next_publish = 0.0

    # Requests.

    def run(self, deadline: float, work: Callable[[Session], T], only: Session | None = None) -> T | None:
        """Run ``work`` on the session, alone. With ``only``: None if the session is not that one any more.

        Raises LockBackendError.
        """
        while True:
            try:
                claim = self.pool.claim(deadline)
            except NoAnswer as error:
                raise self.pool.no_answer(error) from driver_error(error)
            slot = claim.slot
            try:
                if only is None:
                    return work(self._opened(slot, deadline))
                if slot.session is only:
                    self._hear(slot, only, deadline)
                return work(only) if slot.session is only else None
            except SessionLost as error:
                slot.drop()
                if only is not None:
                    return None
                if error.sent:
                    raise LockBackendError(
                        f"The connection to the database {self.alias!r} was lost: {error}", uncertain=True
                    ) from driver_error(error)
            except NoAnswer as error:
                self.doubtful = True
                raise self.pool.no_answer(error) from driver_error(error)
            except driver_errors() as error:
                explain(error, self.alias)
            except BaseException:
                self.doubtful = True
                raise
            finally:
                claim.give_back()

    def rows(self, statement: Statement, *parameters: Parameter, deadline: float) -> list[Row]:
        """The rows of a question that changes nothing."""
        try:
            return self.run(deadline, lambda session: session.execute(statement, parameters, deadline)) or []
        finally:
            self._rest()

    def _rest(self) -> None:
        """Close the session if it carries nothing, in a test run or if that is the quickest way to take back marks."""
        self.pool.used()
        if self._unwanted_marks and not self.pool.in_use():
            self.pool.close_idle(0)

    def _opened(self, slot: Slot, deadline: float) -> Session:
        before = slot.session
        if before is not None:
            if before.open:
                self._hear(slot, before, deadline)
            else:
                slot.drop()
        session = self.pool.opened(slot, deadline)
        if session is not self._ready:
            try:
                self._make_ready(session, deadline)
            except BaseException:
                slot.drop()
                raise
            self._is_ready(session)
        return session

    def _is_ready(self, session: Session) -> None:
        self._unwanted_marks = []  # they went with the session before
        self._ready, self.gates = session, {}

    def _make_ready(self, session: Session, deadline: float) -> None:
        """Before the first use of a session for holds."""
        if session.in_recovery:
            raise LockBackendError(
                f"The database {self.alias!r} is a read-only replica, where nothing can be locked: use an alias "
                f"of the primary server"
            )
        if not session.direct and not self._sessions_proven:
            sql.refuse_transaction_pooling(session, deadline)
            self._sessions_proven = True
        try:
            session.execute(Statement(f"LISTEN {sql.ask_channel(session.server_pid)}"), [], deadline)
        except driver_errors() as error:  # a pooler may refuse it; only a release by force needs it
            logger.warning("Session locks on %r cannot be released by force: %s", self.alias, error)

    def _hear(self, slot: Slot, session: Session, deadline: float) -> None:
        """Read the answer that is due, if one is; put another session in place of one that gets no answers any more.

        A firewall may have forgotten the connection, while new ones work at once. Then all holds of the old one are
        lost, which they are told.
        """
        asked = session.waits_since
        if asked is None:
            return
        judged_at = max(asked + sql.SILENT_SECONDS, clock.now())
        try:
            session.drain(judged_at if judged_at < (clock.now() + deadline) / 2 else deadline)
            return
        except SessionLost as error:
            raise SessionLost(str(error), sent=False) from error.__cause__
        except NoAnswer:
            if clock.now() < judged_at or clock.now() >= deadline:
                raise NoAnswer(sent=False) from None
        try:
            other = self.pool.connect(deadline)
        except CannotConnect:  # then no session is answered
            raise NoAnswer(sent=False) from None
        try:
            self._make_ready(other, deadline)
            forgotten = sql.waits_for_client(other, session.server_pid, deadline)
            with contextlib.suppress(NoAnswer):
                session.drain(clock.now() if forgotten else deadline)  # it may have come, or may yet come, after all
            if not session.busy:
                return
            if not forgotten:
                raise NoAnswer(sent=False)
            logger.warning("The session of the locks on %r gets no answers; a new one takes its place", self.alias)
            slot.drop()  # from now on its holds count as lost
            slot.session = other
            self._is_ready(other)
            sql.end_session(other, session.server_pid, deadline)
        finally:
            if slot.session is not other:
                other.close()

    # Holds.

    def register(self, entry: Entry, deadline: float) -> bool:
        """Give ``entry`` its place in the table; False if this process holds the lock already.

        A try of another thread whose outcome is unknown is no refusal: it is waited for. One of this very thread, which
        a signal handler has interrupted, cannot be: the handler is refused.
        """
        pause = 0.0002
        while (present := self.entries.setdefault(entry.key, entry)) is not entry:
            if not present.alive:
                self.forget(present)
            elif present.granted or present.asked_for_here or self.pool.interrupted_here:
                return False
            elif clock.now() >= deadline:
                raise LockBackendError(f"An earlier try for {entry.name} was not answered yet", name=entry.name)
            else:
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
        if len(self.entries) > MAX_HOLDS:
            self.forget(entry)
            raise LockBackendError(
                f"This process holds {MAX_HOLDS} session locks already, the most that it may (the server's table of "
                f"locks is shared by all its databases): use TableLockBackend for so many",
                name=entry.name,
            )
        return True

    def forget(self, entry: Entry) -> None:
        """Take ``entry`` out of the table, and let the session close if it was the last one in a test run."""
        if self.entries.get(entry.key) is entry:
            self.entries.pop(entry.key, None)
            if self.gates.get(entry.gate) is False and not self.members_of(entry.gate):
                self.gates.pop(entry.gate, None)
            if not self.entries:
                self._rest()

    def members_of(self, gate: int) -> list[Entry]:
        """The shared and placed holds of a key in this process; none in no time, as nearly always."""
        if gate not in self.gates:
            return []
        return [entry for entry in list(self.entries.values()) if entry.gate == gate and entry.session is not None]

    def rename(self, entry: Entry, key: int) -> None:
        """Let ``entry`` have the key that the server has given it. With the session claimed."""
        before, entry.key = entry.key, key
        self.entries[key] = entry
        if before != key:
            self.entries.pop(before, None)

    def held_on(self, session: Session, deadline: float) -> set[int]:
        """The keys that the server says this session holds."""
        return {int(row[0] or 0) for row in session.execute(sql.MINE, [], deadline)}

    def free(self, entry: Entry, deadline: float) -> bool:
        """Unlock, and forget the entry; False if it was not held, or its session is gone."""
        freed = False
        if entry.session is not None:
            freed = bool(self.run(deadline, lambda session: self._free_on(session, entry, deadline), entry.session))
        self.forget(entry)
        return freed

    def _free_on(self, session: Session, entry: Entry, deadline: float) -> bool:
        if self.entries.get(entry.key) is not entry:
            return False  # another thread was faster, and the next hold of this key may be on this very session
        failure: BaseException | None = None
        if entry.unlocking is not None:  # an earlier try, which was not waited for
            session.drain(deadline)
            answers = [result.get_value(0, 0) for result in entry.unlocking.results if result.ntuples]
            if b"t" in answers:
                return True
            failure = None if answers else LockBackendError(f"The release of {entry.name} failed", name=entry.name)
            entry.unlocking = None
        if entry.gate and not entry.granted:
            members.take_back(self, session, entry, deadline)
            return False
        # Only the published row or the notification (its queue may be full) can fail, and the lock is free by then.
        ways = members.ways_out(entry)
        try:
            for statement, parameters in ways:
                if failure is not None and entry.key not in self.held_on(session, deadline):
                    return True
                try:
                    [row] = session.execute(statement, parameters, deadline, entry.owner)
                    if self.gates.get(entry.gate):  # counted too often
                        members.open_gates(self, session, deadline, but=entry)
                    return row[0] == b"t"
                except driver_errors() as error:
                    failure = error
            assert failure is not None
            raise failure
        except BaseException:
            if session.busy:
                entry.unlocking = session.pending
            raise

    # Marks of those who wait.

    def mark(self, name: str, deadline: float) -> None:
        """Let releases of ``name`` in other processes be told, for the next ``MARK_SECONDS``."""
        marker = marker_key(name)

        def work(session: Session) -> None:
            if (marker, session) in self._unwanted_marks:
                self._unwanted_marks.remove((marker, session))
            elif self._marks.get(marker, (None, 0.0))[0] is not session:
                session.execute(sql.MARK, [marker], deadline)
            self._marks[marker] = (session, clock.now())
            self._unmark(session, deadline)

        try:
            self.run(deadline, work)
        except LockBackendError as error:
            if not refused(error):
                raise  # else the wait goes on at the fallback interval, without the mark

    def unmark_all(self) -> None:
        """No caller waits any more. Sends nothing itself: the marks go in the background, or with the session."""
        while self._marks:
            marker, (session, _) = self._marks.popitem()
            self._unwanted_marks.append((marker, session))
        self._rest()

    def _unmark(self, session: Session, deadline: float) -> None:
        for marker, (on, asked) in list(self._marks.items()):
            if clock.now() - asked > MARK_SECONDS:
                self._marks.pop(marker, None)
                self._unwanted_marks.append((marker, on))
        unwanted, self._unwanted_marks = self._unwanted_marks, []
        markers = ",".join(str(marker) for marker, on in unwanted if on is session)
        if markers:
            session.execute(sql.UNMARK, ["{" + markers + "}"], deadline)

    # In the background, on the renewal thread.

    def look_after(self, deadline: float) -> None:
        """Hear what the session has to say, and put the server's picture and ours in accord."""
        session = self.pool.slots[0].session
        if session is None:
            return
        try:
            self.run(deadline, lambda session: self._look_after(session, deadline), only=session)
        except LockBackendError as error:
            logger.debug("The session of the locks on %r: %s", self.alias, error)

    def _look_after(self, session: Session, deadline: float) -> None:
        session.drain(deadline)
        if not session.look():
            raise SessionLost("the server has closed the connection", sent=False)
        heard, session.notifications = session.notifications, []
        for _, payload in heard:
            self._asked(payload, deadline)
        if self.doubtful:
            self.sweep(session, deadline)
        self._unmark(session, deadline)
        self._publish(session, deadline)

    def _asked(self, payload: str, deadline: float) -> None:
        """Somebody wants a hold to be given up by force: ``<key>:<fencing token, if he knew it>:<when he asked>``."""
        asked = _ASKED.fullmatch(payload)
        entry = self.entries.get(int(asked[1])) if asked else None
        if asked is None or entry is None or not entry.granted or asked[2] not in ("", str(entry.token)):
            return
        if entry.acquired_at <= float(asked[3]):  # else it was about an earlier one, and comes late
            logger.warning("The lock %s is given up because somebody asked for it by force", entry.name)
            try:
                self.free(entry, deadline)  # its own lock learns of it from extend(), as of any loss
            except LockBackendError:
                if entry.unlocking is not None:
                    # It is or will be free, so it is lost; the answer must not be taken for that of its own release.
                    self.forget(entry)
                raise

    def sweep(self, session: Session, deadline: float) -> None:
        """After an interruption: free what is held but not wanted, and find what is wanted but not held."""
        held = self.held_on(session, deadline)
        for key in held - self.entries.keys():
            session.execute(sql.UNLOCK, [key], deadline)
        for entry in list(self.entries.values()):
            if entry.granted and entry.session is session and entry.key not in held:
                self.forget(entry)
        self.gates.update(dict.fromkeys(self.gates, True))
        members.open_gates(self, session, deadline)
        self.doubtful = False

    def _publish(self, session: Session, deadline: float) -> None:
        now = clock.now()
        old = [
            entry
            for entry in list(self.entries.values())
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
        except driver_errors() as error:
            self._next_publish = now + PRUNE_EVERY  # the locks themselves do not need it
            logger.warning("The holders of session locks on %r cannot be published: %s", self.alias, error)
