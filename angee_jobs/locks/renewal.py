"""Renewing leases, noticing and telling losses, and releasing what its holder cannot release any more.

All of it is a job of the background thread. Requests of a backend are made on that thread itself only while it is the
only backend in use and answers promptly. Otherwise each backend has a short-lived thread of its own for them: one that
hangs or is slow costs the holds at another nothing.
"""

from __future__ import annotations

import atexit
import functools
import math
from collections.abc import Callable, Iterable

from django.dispatch import Signal

from . import clock, process, signals
from .backends.base import OPERATION_SECONDS, BaseLockBackend, Extension, Grant
from .background import background
from .errors import LockBackendError
from .hold import Hold, State
from .log import logger
from .types import printable

#: How often a session lock's connection is looked at, in seconds: its loss must be told within two.
SESSION_WATCH_SECONDS = 1.0
#: How long a backend may keep the background thread itself, in seconds.
PROMPT_SECONDS = 1.0
#: How long it may keep the thread of its own that it gets otherwise.
OWN_THREAD_SECONDS = 10.0
#: How long an abandoned hold is tried again, in seconds, and the longest pause between two tries.
ABANDONED_SECONDS = 600.0
ABANDONED_PAUSE = 5.0


class _Abandoned:
    """A hold that the background thread has to release, since its holder cannot."""

    __slots__ = ("by", "hold", "next_try", "pause", "since")

    def __init__(self, hold: Hold, by: Callable[[float], object] | None) -> None:
        self.hold = hold
        #: What releases it, given a deadline, where that is more than one request.
        self.by = by
        self.since = self.next_try = clock.now()
        self.pause = 0.1

    def later(self) -> None:
        self.next_try = clock.now() + self.pause
        self.pause = min(self.pause * 2, ABANDONED_PAUSE)


class Renewer:
    """See the module. There is one, :data:`renewer`."""

    def __init__(self) -> None:
        #: Every hold of this process that has not ended, in the order of their grants.
        self.holds: dict[Hold, None] = {}
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a forked child."""
        self.holds.clear()
        self._abandoned: list[_Abandoned] = []
        #: Backends that failed or were slow the last time, those that a thread of their own asks now, and since when
        #: and how often those that fail have failed.
        self._slow: set[BaseLockBackend] = set()
        self._busy: set[BaseLockBackend] = set()
        self._failing: dict[BaseLockBackend, tuple[float, int]] = {}

    # Called from anywhere.

    def watch(self, hold: Hold, grant: Grant, *, renews: bool) -> None:
        """The request that was sent at ``hold.started`` won: watch it from now on, and renew it if it ``renews``."""
        hold.fencing_token = grant.fencing_token
        hold.granted = grant.acquired_at
        hold.granted_expiry = grant.expires_at
        hold.place = grant.place
        sent, ttl = hold.started, hold.ttl
        if hold.backend.leases:
            hold.renews = renews
            hold.renew_at = sent + ttl / 3 if renews else math.inf
            hold.deadline = sent + ttl
        else:
            hold.renews = True  # is looked at, whether or not its block renews
            hold.renew_at = sent + SESSION_WATCH_SECONDS
            hold.deadline = math.inf
        self.holds[hold] = None
        due = min(hold.renew_at, hold.deadline, hold.latest_end)
        # What background.announce() does, without the call: every acquire passes here.
        background.soonest = min(background.soonest, due - sent)
        if due < background.wakes_at or not background.running:
            background.announce(due - sent, due)

    def start_renewing(self, hold: Hold) -> None:
        """Renew ``hold`` from now on, which so far was only watched."""
        if hold.backend.leases:
            hold.renews = True
            hold.renew_at = clock.now()  # how old its lease is, who knows
            background.wake()

    def end(self, hold: Hold, state: State) -> bool:
        """End ``hold`` here, so that it is watched no more; True for the one caller that did."""
        if not hold.end(state):
            return False
        self.holds.pop(hold, None)
        return True

    def abandon(self, hold: Hold, *, by: Callable[[float], object] | None = None) -> None:
        """Have ``hold``, or what an interrupted acquire made of it, released soon. Safe in finalizers.

        ``by`` releases it, once, where it has not ended yet and more is to be done than to free it.
        """
        background.post(functools.partial(self._abandon, hold, by))

    def lose(self, hold: Hold, reason: str) -> None:
        """``hold`` has ended without its holder releasing it. Told once."""
        if self.end(hold, State.LOST):
            self._tell_loss(hold, reason)

    def lose_released(self, hold: Hold, reason: str) -> None:
        """``hold``, which its holder was releasing, had been lost before."""
        hold.found_lost()
        self._tell_loss(hold, reason)

    def expire(self, hold: Hold) -> None:
        """The local clock says that ``hold`` is over: its lease, or the longest time that it may last."""
        if clock.now() < hold.latest_end:
            self.lose(hold, "its lease ran out before it could be renewed")
        elif self.end(hold, State.LOST):
            self.abandon(hold)  # for the backend it goes on
            self._tell_loss(hold, "it was held for longer than hold_at_most")

    def _tell_loss(self, hold: Hold, reason: str) -> None:
        held_for = clock.now() - hold.started
        logger.warning("Lost the lock %s after %.1f s: %s", printable(hold.name), held_for, reason)
        if hold.on_lost is not None:
            hold.on_lost()
        hold.backend.changed(hold.name)
        if signals.lock_lost.receivers:
            background.dispatch(functools.partial(_tell, signals.lock_lost, hold, held_for=held_for, reason=reason))

    def tell_release(self, hold: Hold, *, dispatch: bool = False) -> None:
        """``hold`` was released as it should be: let the waiters of this process and the receivers know."""
        hold.backend.changed(hold.name)
        if signals.lock_released.receivers:
            held_for = clock.now() - hold.started
            tell = functools.partial(_tell, signals.lock_released, hold, held_for=held_for)
            if dispatch:
                background.dispatch(tell)
            else:
                tell()

    def release_all(self, holds: Iterable[Hold] | None = None) -> None:
        """At the interpreter's exit: release what is still held, each tried even if another fails."""
        process.check()
        limit = clock.now() + OPERATION_SECONDS
        for hold in list(self.holds if holds is None else holds):
            if hold.foreign or not self.end(hold, State.RELEASED):
                continue
            try:
                hold.release_at_backend(min(limit, clock.now() + PROMPT_SECONDS))
            except Exception:
                logger.exception("The lock %s could not be released at exit", printable(hold.name))

    # On the background thread.

    def _abandon(self, hold: Hold, by: Callable[[float], object] | None) -> None:
        if not hold.foreign:
            if by is None:
                hold.end(State.RELEASED)
                self.holds.pop(hold, None)  # also one whose end was struck in the middle
            self._abandoned.append(_Abandoned(hold, by))

    def round(self) -> float:
        """Do what is due; when to look again."""
        now = clock.now()
        due: dict[BaseLockBackend, list[Hold]] = {}
        for hold in list(self.holds):
            if hold.ended:
                self.holds.pop(hold, None)
            elif now >= hold.latest_end or now >= hold.deadline:
                self.expire(hold)
            elif now >= hold.renew_at:
                due.setdefault(hold.backend, [])
        for hold in list(self.holds):
            # What is half-way to its renewal joins a hold that is due: soon all go in one batch.
            if hold.backend in due and hold.renews and now >= hold.renew_at - hold.ttl / 6:
                due[hold.backend].append(hold)
        abandoned: dict[BaseLockBackend, list[_Abandoned]] = {}
        for left in list(self._abandoned):
            if left.hold.in_flight is not None and not left.hold.in_flight.done():
                left.next_try = now + 0.05  # a release that overtakes its acquire would release nothing
            elif now >= left.next_try:
                abandoned.setdefault(left.hold.backend, []).append(left)
        others = {hold.backend for hold in list(self.holds)} | {left.hold.backend for left in list(self._abandoned)}
        for backend in due.keys() | abandoned.keys():
            if backend not in self._busy:
                alone = backend not in self._slow and others <= {backend}
                self._serve(backend, due.get(backend, []), abandoned.get(backend, []), alone)
        wake = clock.now() + PROMPT_SECONDS if self._busy else math.inf
        for hold in list(self.holds):
            wake = min(wake, hold.deadline, hold.latest_end)
            if hold.backend not in self._busy:
                wake = min(wake, hold.renew_at)
        return min([wake, *(left.next_try for left in list(self._abandoned) if left.hold.backend not in self._busy)])

    def _serve(self, backend: BaseLockBackend, due: list[Hold], abandoned: list[_Abandoned], alone: bool) -> None:
        if alone:
            self._work(backend, due, abandoned, PROMPT_SECONDS)
            return
        self._busy.add(backend)

        def work() -> None:
            try:
                self._work(backend, due, abandoned, OWN_THREAD_SECONDS)
            finally:
                self._busy.discard(backend)
                background.wake()

        if not process.start_thread(work, "angee-locks-renewal-own"):
            self._busy.discard(backend)
            self._work(backend, due, abandoned, PROMPT_SECONDS)

    def _work(self, backend: BaseLockBackend, due: list[Hold], abandoned: list[_Abandoned], seconds: float) -> None:
        """Renew what is due, then release what was abandoned, in ``seconds`` at the most."""
        started = clock.now()
        for hold in due:  # the retry, should this one fail
            hold.renew_at = started + min(PROMPT_SECONDS, hold.ttl / 10)
        due.sort(key=lambda hold: hold.deadline)  # should there be more than one batch, the most pressing goes first
        try:
            for at in range(0, len(due), backend.extend_batch):
                self._extend(backend, due[at : at + backend.extend_batch], seconds)
            for left in abandoned:
                # The rest comes with the next round: a slow server must not keep its own leases waiting either. Seen
                # with 100 dropped locks at 0.2 s each.
                if clock.now() - started > PROMPT_SECONDS / 2:
                    break
                self._release(left, seconds)
        except Exception as error:
            self._slow.add(backend)
            since, times = self._failing.get(backend, (started, 0))
            self._failing[backend] = since, times + 1
            if isinstance(error, LockBackendError):
                logger.warning("Renewing the locks of %r failed: %s", backend.alias, error)
            else:
                logger.exception("Renewing the locks of %r failed", backend.alias)
            return
        if (failed := self._failing.pop(backend, None)) is not None:
            message = "The locks of %r can be renewed again, after %d failed tries in %.1f s"
            logger.warning(message, backend.alias, failed[1], clock.now() - failed[0])
        if clock.now() - started > PROMPT_SECONDS / 2:
            self._slow.add(backend)
        else:
            self._slow.discard(backend)

    def _extend(self, backend: BaseLockBackend, holds: list[Hold], seconds: float) -> None:
        holds = [hold for hold in holds if not hold.ended]
        if not holds:
            return
        sent = clock.now()
        limit = min(min(hold.deadline for hold in holds), sent + seconds)
        if seconds > PROMPT_SECONDS:
            # On a thread of its own: what comes too late for the most pressing hold may come in time for the others.
            limit = max(limit, sent + PROMPT_SECONDS)
        try:
            extended = set(backend.extend([Extension(hold.name, hold.owner, hold.next_ttl()) for hold in holds], limit))
        except LockBackendError as error:
            self._extended([hold for hold in holds if hold.owner in error.extended], sent)
            raise
        except Exception:
            if len(holds) == 1:
                raise
            logger.exception("Renewing %d locks at once failed; each is tried alone", len(holds))
            for hold in holds:
                try:
                    self._extend(backend, [hold], seconds)
                except Exception:
                    logger.exception("Renewing the lock %s failed", printable(hold.name))
            return
        for hold in holds:
            if hold.owner not in extended:
                self.lose(hold, "the backend does not know it any more")
        self._extended([hold for hold in holds if hold.owner in extended], sent)

    def _extended(self, holds: list[Hold], sent: float) -> None:
        for hold in holds:
            if hold.state is State.LOST:
                self.abandon(hold)  # told as lost while the call was under way: it may not come back
            else:
                hold.extended(sent, hold.next_ttl())
                hold.renew_at = sent + (hold.ttl / 3 if hold.backend.leases else SESSION_WATCH_SECONDS)

    def _release(self, left: _Abandoned, seconds: float) -> None:
        hold, limit = left.hold, clock.now() + min(OPERATION_SECONDS, seconds)
        if left.by is not None:
            self._abandoned.remove(left)
            left.by(limit)
            return
        left.later()
        try:
            hold.release_at_backend(limit)
        except Exception:
            if clock.now() - left.since > ABANDONED_SECONDS:
                self._abandoned.remove(left)
                logger.exception("The abandoned lock %s could not be released", printable(hold.name))
                return
            raise
        self._abandoned.remove(left)
        hold.backend.changed(hold.name)


def _tell(signal: Signal, hold: Hold, **arguments: object) -> None:
    signals.tell(
        signal,
        type(hold.backend),
        key=hold.key,
        backend=hold.backend.alias,
        fencing_token=hold.fencing_token,
        **arguments,
    )


renewer = Renewer()
background.jobs.append(renewer.round)
process.on_fork(in_child=renewer.reset)
atexit.register(renewer.release_all)
