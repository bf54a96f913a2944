"""A few sessions with PostgreSQL for requests that need none of their own."""

from __future__ import annotations

import _thread
import queue
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ... import clock, process
from ...errors import LockBackendError
from ...process import in_test_run
from .errors import NoAnswer, SessionLost, driver_error, driver_errors, explain
from .parameters import database_name
from .session import Session
from .slots import Claim, Slot
from .statements import Parameter, Row, Statement

#: Sessions that were not used for this many seconds are closed.
IDLE_SECONDS = 30.0
#: What a wake-up that went to the wrong thread costs at most, in seconds.
_RESCAN_SECONDS = 0.05
#: Whoever has waited so long for a session has been woken in vain, and others give way to it.
STARVED_SECONDS = 0.05
#: For so long they do, which is enough to be woken up.
GIVE_WAY_SECONDS = 0.001


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
        self._reset()

    def _reset(self) -> None:
        self.generation = process.generation
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.waiters = 0
        #: When somebody last was woken in vain for too long.
        self.starved_at = 0.0
        self.slots = [Slot() for _ in range(self.size)]

    # Claims.

    @property
    def interrupted_here(self) -> bool:
        return any(slot.claimed_here for slot in self.slots)

    def claim(self, deadline: float) -> Claim:
        """A slot for the caller alone; NoAnswer if none comes free in time."""
        if self.generation != process.generation:
            self._reset()
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
                raise NoAnswer(sent=False)
            if started is None:
                started = now
            elif now - started > STARVED_SECONDS:
                self.starved_at = now
            self.waiters += 1
            try:
                self.bell.get(timeout=min(seconds, _RESCAN_SECONDS))
            except queue.Empty:
                pass
            finally:
                self.waiters -= 1

    def _try_claim(self) -> Claim | None:
        slots = self.slots
        for slot in slots:  # nearly always the first one is it
            session = slot.session
            if session is not None and "by" not in slot.claims and not session.busy:
                claim = Claim(self, slot)
                if claim.take():
                    return claim
        free = [slot for slot in slots if not slot.claimed]
        for slot in sorted(free, key=lambda slot: slot.session is not None):  # new ones before busy ones
            claim = Claim(self, slot)
            if claim.take():
                return claim
        for slot in slots:
            if slot.claimed_here:
                if self.shared:
                    return Claim(self, slot)  # not taken, so that it gives nothing back
                slots.append(Slot())
                break
        return None

    def opened(self, slot: Slot, deadline: float) -> Session:
        """The slot's session, a new one if need be; LockBackendError if there is no connecting."""
        session = slot.session
        if session is not None:
            if session.database == database_name(self.alias):
                return session
            slot.drop()
        try:
            session = Session(self.alias, deadline, self.settings, self.forced, **self.extra)
        except (SessionLost, NoAnswer) as error:
            raise LockBackendError(f"The database {self.alias!r} cannot be connected to: {error}") from driver_error(
                error
            )
        except driver_errors() as error:
            raise LockBackendError(f"The database {self.alias!r} cannot be used: {error}") from error
        if slot.session is not None:  # a signal handler has opened it meanwhile
            session.close()
            return slot.session
        slot.session = session
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
        while True:
            try:
                claim = self.claim(deadline)
            except NoAnswer as error:
                raise self.no_answer(error) from driver_error(error)
            slot = claim.slot
            try:
                return self.opened(slot, deadline).execute(statement, parameters, deadline, owner)
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
        if in_test_run():
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
        for slot in list(self.slots):
            while _is_about(slot.session, owner):
                claim = Claim(self, slot)
                try:
                    if claim.take():
                        if _is_about(slot.session, owner) and slot.session is not None:
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

    # The end of sessions.

    def close_idle(self, seconds: float) -> bool:
        """Close what nobody has used for ``seconds`` and owes no answer about a hold; whether any session is left."""
        for slot in list(self.slots):
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
            slot.drop_idle()
            return False
        finally:
            claim.give_back()

    def close(self) -> None:
        if self.generation == process.generation:
            self.close_idle(0)


def _is_about(session: Session | None, owner: str) -> bool:
    return session is not None and session.pending_owner == owner


class _Janitor:
    """Closes idle sessions. Its thread is there only while a pool has some."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        self._running: dict[str, object] = {}

    def watch(self, pool: Pool) -> None:
        self._pools.add(pool)
        if in_test_run():
            return  # they are closed at once
        mine = object()
        if self._running.setdefault("thread", mine) is mine:
            try:
                # Not by threading.Thread: a signal handler's exception in its start() leaves a thread that never runs.
                _thread.start_new_thread(self._run, ())
            except BaseException:
                self._running.pop("thread", None)
                raise

    def _run(self) -> None:
        while True:
            time.sleep(IDLE_SECONDS / 3)
            pools = list(self._pools)
            if not [pool for pool in pools if pool.close_idle(IDLE_SECONDS)]:
                self._running.pop("thread", None)
                if not [pool for pool in pools if any(slot.session for slot in pool.slots)]:
                    return
                mine = object()  # one was opened meanwhile
                if self._running.setdefault("thread", mine) is not mine:
                    return


_janitor = _Janitor()
process.on_fork(in_child=_janitor._reset)
