"""A few sessions with PostgreSQL for requests that need none of their own."""

from __future__ import annotations

import functools
import math
import queue
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ... import clock, process
from ...errors import LockBackendError
from ...process import in_test_run
from .errors import CannotConnect, NoAnswer, SessionLost, driver_error, driver_errors, explain
from .parameters import database_name
from .session import Session
from .slots import Claim, Slot
from .statements import Parameter, Row, Statement

#: Sessions that were not used for this many seconds are closed.
IDLE_SECONDS = 30.0
#: What a wake-up that went to the wrong thread costs at most, in seconds.
_RESCAN_SECONDS = 0.05
#: A thread that has waited so long for a session has been woken in vain, and others give way to it.
STARVED_SECONDS = 0.05
#: For so long they do, which is enough to be woken up.
GIVE_WAY_SECONDS = 0.001
#: Where a connection was refused, threads wait for so long for the sessions that are there before one asks again.
REFUSED_SECONDS = 0.2
#: An answer that has not come after so long, although other sessions got theirs, is not waited for any more. A lease
#: that is granted as late as that counts for nobody.
SILENT_SECONDS = 30.0


class Pool:
    """At most ``size`` sessions to one database, the ones used last first.

    ``settings``, ``forced`` and ``extra`` are passed to each :class:`Session`. With ``shared``, a signal handler that
    interrupts a request joins it on its session; otherwise it gets one more.
    """

    def __init__(
        self,
        alias: str,
        size: int,
        *,
        shared: bool = False,
        settings: dict[str, str] | None = None,
        forced: dict[str, str] | None = None,
        **extra: str,
    ) -> None:
        self.alias = alias
        self.size = size
        self.shared = shared
        self.settings = settings
        self.forced = forced
        self.extra = extra
        #: Whether connections reach the server itself; None as long as there was none.
        self.direct: bool | None = None
        #: Whether the sessions carry something that would end with them, so that they must not be closed.
        self.in_use: Callable[[], bool] = lambda: False
        #: Whether one session is to stay open, outside of a test run.
        self.kept: Callable[[], bool] = lambda: False
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self.waker: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting: weakref.WeakValueDictionary[int, _Token] = weakref.WeakValueDictionary()
        #: When a thread last was woken in vain for too long.
        self.starved_at = 0.0
        #: When a connection was last refused, and when a request was last answered.
        self.refused_at = self.answered_at = -math.inf
        self.slots = [Slot() for _ in range(self.size)]

    # Claims.

    @property
    def waiters(self) -> bool:
        """Whether threads wait for a session."""
        return bool(self._waiting)

    @property
    def interrupted_here(self) -> bool:
        return any(slot.claimed_here for slot in self.slots)

    def claim(self, deadline: float) -> Claim:
        """A slot for the caller alone; NoAnswer if none comes free in time."""
        process.check()
        if self.starved_at and clock.now() - self.starved_at < STARVED_SECONDS:
            # A thread that asks again as soon as it has its answer would be faster than any that is woken up.
            time.sleep(GIVE_WAY_SECONDS)
        started: float | None = None
        while True:
            claim = self._try_claim()
            if claim is not None:
                return claim
            now = clock.now()
            seconds = deadline - now
            if seconds <= 0:
                self.used()
                raise NoAnswer(sent=False)
            if started is None:
                started = now
            elif now - started > STARVED_SECONDS:
                self.starved_at = now
            waiting = _Token()
            self._waiting[id(waiting)] = waiting
            try:
                self.waker.get(timeout=min(seconds, _RESCAN_SECONDS))
            except queue.Empty:
                pass
            except BaseException:
                del waiting
                self.used()  # which was left to us
                raise
            del waiting

    def _try_claim(self) -> Claim | None:
        slots = self.slots
        for slot in slots:  # nearly always the first one is it
            session = slot.session
            if session is not None and "by" not in slot.claims and not session.busy:
                claim = Claim(self, slot)
                if claim.take():
                    return claim
        silent = 0
        for slot in list(slots):
            if slot.session is not None and not slot.claimed:
                claim = Claim(self, slot)
                if claim.take():
                    if self.shared or slot.answered():
                        return claim
                    claim.give_back(quietly=True)
                    silent += 1
        if clock.now() - self.refused_at > REFUSED_SECONDS or not self._others():
            # A session that is silent may be so for ever, as behind a firewall that forgot it: another takes its place.
            room = self.size + min(silent, self.size)
            for number in range(room):
                if number == len(slots):
                    slots.append(Slot())
                slot = slots[number]
                claim = Claim(self, slot)
                if slot.session is None and not slot.claimed and claim.take():
                    return claim
        if self.interrupted_here:
            if self.shared:
                slot = next(slot for slot in slots if slot.claimed_here)
                return Claim(self, slot)  # not taken, so that it gives nothing back
            slots.append(Slot())
            claim = Claim(self, slots[-1])
            if claim.take():
                return claim
        return None

    def _others(self, than: Slot | None = None) -> bool:
        """Whether there are sessions that can be waited for, also of those that are just being opened."""
        return any(slot is not than and (slot.session is not None or slot.claimed) for slot in list(self.slots))

    def opened(self, slot: Slot, deadline: float) -> Session:
        """The slot's session, a new one if need be; LockBackendError if there is no connecting."""
        session = slot.session
        if session is not None:
            if session.database == database_name(self.alias):
                return session
            slot.drop()
        session = self.connect(deadline)
        if slot.session is not None:  # a signal handler has opened it meanwhile
            session.close()
            return slot.session
        slot.session = session
        return session

    def connect(self, deadline: float) -> Session:
        """A new session, in no slot yet; CannotConnect if there is none to be had."""
        try:
            session = Session(self.alias, deadline, self.settings, self.forced, **self.extra)
        except (SessionLost, NoAnswer) as error:
            if isinstance(error, SessionLost):  # not of one that merely had no time left, or all wait in vain in turn
                self.refused_at = clock.now()
            raise CannotConnect(f"The database {self.alias!r} cannot be connected to: {error}") from driver_error(error)
        except driver_errors() as error:
            self.refused_at = clock.now()
            raise CannotConnect(f"The database {self.alias!r} cannot be used: {error}") from error
        self.direct = session.direct
        _janitor.watch(self)
        return session

    # Requests.

    def run(
        self,
        statement: Statement,
        parameters: Sequence[Parameter],
        deadline: float,
        *,
        owner: str = "",
        again: bool = False,
    ) -> list[Row]:
        """The rows of ``statement``. ``again``: it may be sent twice, if the connection died before the answer.

        Raises LockBackendError; RowLocked if the statement's own ``lock_timeout`` ran out.
        """
        replaced = False
        refusal: CannotConnect | None = None
        while True:
            try:
                claim = self.claim(deadline)
            except NoAnswer as error:
                if refusal is not None:
                    raise refusal from refusal.__cause__
                raise self.no_answer(error) from driver_error(error)
            slot = claim.slot
            # Where no more connections are granted, a thread waits for one that is there; to learn that takes not
            # longer than half of its time.
            others = slot.session is None and self._others(slot)
            try:
                session = self.opened(slot, (clock.now() + deadline) / 2 if others else deadline)
                rows = session.execute(statement, parameters, deadline, owner)
                self.answered_at = clock.now()
                return rows
            except CannotConnect as error:
                if not (others or self._others(slot)) or clock.now() >= deadline:
                    raise
                refusal = error
            except SessionLost as error:
                slot.drop()
                if error.sent and (replaced or not again):
                    raise LockBackendError(
                        f"The connection to the database {self.alias!r} was lost: {error}", uncertain=True
                    ) from driver_error(error)
                replaced = replaced or error.sent
            except NoAnswer as error:
                raise self.no_answer(error) from driver_error(error)
            except driver_errors() as error:
                self.refused(error, slot.session, deadline)
            finally:
                claim.give_back()
                self.used()

    def used(self) -> None:
        """After a request: in a test run, no session stays that would keep the test database from being dropped."""
        if in_test_run() and not self.waiters:
            self.close_idle(0)

    def no_answer(self, error: NoAnswer) -> LockBackendError:
        return LockBackendError(f"The database {self.alias!r} did not answer in time", uncertain=error.sent)

    def refused(self, error: Any, session: Session | None, deadline: float) -> None:
        """The server refused the statement: return if it is worth another try, else raise what it means."""
        state = error.sqlstate or ""
        if state in ("40001", "40P01") and clock.now() < deadline:  # a pooled session's isolation, or a deadlock
            return
        if state in ("26000", "0A000") and session is not None and session.forget_prepared():
            return
        explain(error, self.alias)

    def drain(self, owner: str, deadline: float) -> None:
        """Wait until no request about ``owner`` is under way any more; LockBackendError if that takes too long."""
        process.check()
        for slot in list(self.slots):
            while _is_about(slot.session, owner):
                claim = Claim(self, slot)
                try:
                    if claim.take():
                        if _is_about(slot.session, owner) and slot.session is not None and not self._give_up(slot):
                            slot.session.drain(deadline)
                    elif clock.now() >= deadline:
                        raise NoAnswer(sent=False)
                    else:
                        time.sleep(0.005)
                except SessionLost:
                    slot.drop()
                except NoAnswer as error:
                    raise LockBackendError(
                        f"The database {self.alias!r} has still not answered an earlier request"
                    ) from driver_error(error)
                finally:
                    claim.give_back()

    def _give_up(self, slot: Slot) -> bool:
        """Close a session whose answer will never come, as far as can be known, while other sessions get theirs."""
        session = slot.session
        asked = session.waits_since if session is not None else None
        if asked is None or clock.now() - asked < SILENT_SECONDS or self.answered_at < asked:
            return False
        slot.drop()
        return True

    # The end of sessions.

    def close_idle(self, seconds: float) -> bool:
        """Close what was not used for ``seconds`` and owes no answer about a hold; whether any session is left."""
        keep = seconds > 0 and self.kept()
        for slot in list(self.slots):
            if keep and slot.session is not None and not slot.session.busy:
                keep = False  # the renewals and the releases must not need a new one
                continue
            # What it was kept for may have gone meanwhile, with a thread that could not have the slot to close it.
            while self._close_unless_needed(slot, seconds) and not self.in_use():
                pass
        return any(slot.session is not None for slot in self.slots)

    def _close_unless_needed(self, slot: Slot, seconds: float) -> bool:
        """Close the session if it is idle; True if it was kept because it is needed."""
        claim = Claim(self, slot)
        try:
            if slot.session is None or clock.now() - slot.used_at < seconds or not claim.take():
                return False
            if self.in_use():
                return True
            if not slot.session.pending_owner:
                slot.drop()
            else:
                self._give_up(slot)
            return False
        finally:
            claim.give_back()

    def close(self) -> None:
        process.check()
        self.close_idle(0)


def _is_about(session: Session | None, owner: str) -> bool:
    return session is not None and session.pending_owner == owner


class _Token:
    """Something is under way as long as this exists: also an exception at any instruction ends it."""

    __slots__ = ("__weakref__",)


class _Janitor:
    """Closes idle sessions. Its thread is there only while a pool has some."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._watched: weakref.WeakSet[Pool] = weakref.WeakSet()
        self._running: Callable[[], _Token | None] = lambda: None

    def watch(self, pool: Pool) -> None:
        self._watched.add(pool)
        if self._running() is not None or in_test_run():  # where they are closed at once
            return
        running = _Token()
        self._running = weakref.ref(running)
        # Where no thread is to be had, as at the interpreter's exit, the next session asks for one again.
        process.start_thread(functools.partial(self._run, running), "angee-locks-idle")

    def _run(self, running: _Token) -> None:
        while True:
            time.sleep(IDLE_SECONDS / 3)
            pools = list(self._watched)
            if [pool for pool in pools if pool.close_idle(IDLE_SECONDS)]:
                continue
            self._running = lambda: None
            if not [pool for pool in pools if any(slot.session for slot in pool.slots)]:
                return
            self._running = weakref.ref(running)  # one was opened meanwhile


_janitor = _Janitor()
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    """The sessions are the parent's, and so are the claims of its threads."""
    _janitor._reset()
    for pool in list(_pools):
        pool._reset()


process.on_fork(in_child=_after_fork)
