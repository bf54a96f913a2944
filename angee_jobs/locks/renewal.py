"""The process's one renewal thread: it renews leases, notices losses and gives up what was left behind.

One thread whatever the number of holds, started with the first. A short hold costs it nothing but an entry in a
dict: the thread sleeps until the earliest hold that is still there is due. Finalizers, which may run at any
instruction of any thread, and interrupted callers only leave a note on a queue for it, since neither may wait for a
lock or a server.

A backend that failed or was slow the last time is served by a thread of its own until it answers promptly again, so
that a hung server does not cost the holds at another one their lives.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import logging
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from . import clock, process, signals
from .backends.base import VERB_SECONDS, BaseLockBackend, Extension
from .errors import LockBackendError
from .hold import SESSION_WATCH_SECONDS, End, Hold

logger = logging.getLogger("angee_jobs.locks")

#: How long a backend may keep the renewal thread itself, in seconds.
PROMPT_SECONDS = 1.0
#: How long it may keep the thread of its own that it gets when it failed or was slow.
PATIENT_SECONDS = 10.0
#: While short holds come and go, the thread looks after this many seconds by itself instead of being woken by each.
LINGER_SECONDS = 2.0
#: How long a hold that could not be given up is tried again, in seconds, and the longest pause between two tries.
GIVE_UP_SECONDS = 600.0
GIVE_UP_PAUSE = 5.0


class Dropped(weakref.ref[Any]):
    """Leaves ``note`` for the renewal thread when its object is dropped, unless it is dropped itself before.

    Not ``__del__``: that is Python code, in which an exception of a signal handler would be swallowed. The callback of
    this one is the queue's own put, in C.
    """

    __slots__ = ("note",)
    note: Callable[[], object]


class _Abandoned:
    """A hold that nobody can release any more but this thread."""

    __slots__ = ("hold", "next_try", "pause", "since")

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.since = self.next_try = clock.now()
        self.pause = 0.1

    def later(self) -> None:
        self.next_try = clock.now() + self.pause
        self.pause = min(self.pause * 2, GIVE_UP_PAUSE)


class Renewer:
    """See the module. There is one, :data:`renewer`."""

    def __init__(self) -> None:
        #: Every hold of this process that has not ended, in the order of their grants.
        self.holds: dict[Hold, None] = {}
        #: Called on the thread at least once a second while they return True ("there may be more to do").
        self.chores: list[Callable[[], bool]] = []
        self._clear()

    def _clear(self) -> None:
        self.holds.clear()
        self._notes: queue.SimpleQueue[Hold | Dropped | Callable[[], object] | None] = queue.SimpleQueue()
        self._abandoned: list[_Abandoned] = []
        self._running: dict[str, object] = {}
        self._wakes_at = math.inf
        #: Of the holds that were added since the thread looked last, the shortest time until one is due.
        self._soonest = math.inf
        self._slow: set[BaseLockBackend] = set()
        self._busy: set[BaseLockBackend] = set()

    # Called from anywhere.

    def add(self, hold: Hold) -> None:
        """Watch ``hold`` from now on, and renew it if it renews."""
        self.holds[hold] = None
        due = hold.due
        self._soonest = min(self._soonest, due - hold.started)
        if not self._running:
            self._start()
        elif due < self._wakes_at:
            self._notes.put(None)

    def start_renewing(self, hold: Hold) -> None:
        """Renew ``hold`` from now on, which so far was only watched."""
        if hold.backend.leases:
            hold.renews = True
            hold.renew_at = clock.now()  # how old its lease is, who knows
            self._notes.put(None)

    def forget(self, hold: Hold) -> None:
        self.holds.pop(hold, None)

    def abandon(self, hold: Hold) -> None:
        """Release ``hold``, or whatever an interrupted acquire made of it, soon. Safe in finalizers."""
        self._notes.put(hold)

    def take_back(self, hold: Hold, error: BaseException) -> None:
        """A try for ``hold`` was struck by ``error``: give up soon what may have come of it, if anything can have."""
        if isinstance(error, ImproperlyConfigured) or (isinstance(error, LockBackendError) and not error.uncertain):
            return  # nothing was sent
        self.ensure_running()
        self.abandon(hold)

    def post(self, note: Callable[[], object]) -> None:
        """Call ``note`` on the thread soon."""
        self._notes.put(note)

    def when_dropped(self, target: object, note: Callable[[], object]) -> Dropped:
        """Call ``note`` on the thread soon after nobody has ``target`` any more; not if the result is dropped first."""
        dropped = Dropped(target, self._notes.put)
        dropped.note = note
        return dropped

    def ensure_running(self) -> None:
        """For those who post without having a hold."""
        if not self._running:
            self._start()

    def _start(self) -> None:
        mine = object()
        if self._running.setdefault("thread", mine) is not mine:
            return
        try:
            # Not by threading.Thread: a signal handler's exception in its start() leaves a thread that never runs, or
            # two. Threads of this kind are daemons; any other would be joined at the interpreter's exit, before the
            # holds are released there.
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:  # at the interpreter's exit, or at the limit of threads
            self._running.clear()
            logger.error("No renewal thread can be started, so locks are not renewed: %s", error)
        except BaseException:
            self._running.clear()
            raise

    # On the thread.

    def _run(self) -> None:
        threading.current_thread().name = "angee-locks-renewal"
        while True:
            self._wakes_at = math.inf  # awake: whoever adds a hold now leaves a note, in case it is not seen below
            try:
                wake = self._round()
            except Exception:
                logger.exception("The renewal thread met an error and goes on")
                wake = clock.now() + PROMPT_SECONDS
            soonest, self._soonest = self._soonest, math.inf
            if soonest != math.inf:
                # Short holds come and go. To wake for each of them would cost more than they do; the next ones of the
                # same kind are due after this, and leave no note.
                wake = min(wake, clock.now() + min(soonest * 0.9, LINGER_SECONDS))
            self._wakes_at = wake
            try:
                pause = None if wake == math.inf else max(0.0, wake - clock.now())
                self._take(self._notes.get(timeout=pause))
                while True:
                    self._take(self._notes.get_nowait())
            except queue.Empty:
                pass

    def _take(self, note: Hold | Dropped | Callable[[], object] | None) -> None:
        if isinstance(note, Dropped):
            note = note.note
        if isinstance(note, Hold):
            if not note.foreign:
                note.end(End.RELEASED)
                self.forget(note)
                self._abandoned.append(_Abandoned(note))
        elif note is not None:
            try:
                note()
            except Exception:
                logger.exception("A note to the renewal thread failed")

    def _round(self) -> float:
        """Do what is due; when to look again."""
        now = clock.now()
        due: dict[BaseLockBackend, list[Hold]] = {}
        for hold in list(self.holds):
            if now >= hold.latest_end or now >= hold.deadline:
                self.expire(hold)
            elif now >= hold.renew_at:
                due.setdefault(hold.backend, [])
        for hold in list(self.holds):
            # Whatever is half-way to its renewal joins one that is due: soon all go in one batch.
            if hold.backend in due and hold.renews and now >= hold.renew_at - hold.ttl / 6:
                due[hold.backend].append(hold)
        leftovers: dict[BaseLockBackend, list[_Abandoned]] = {}
        for left in self._abandoned:
            if left.hold.in_flight is not None and not left.hold.in_flight.done():
                left.next_try = now + 0.05  # a release that overtakes its acquire would release nothing
            elif now >= left.next_try:
                leftovers.setdefault(left.hold.backend, []).append(left)
        for backend in due.keys() | leftovers.keys():
            if backend not in self._busy:
                self._serve(backend, due.get(backend, []), leftovers.get(backend, []))
        more = [chore() for chore in self.chores]
        wake = clock.now() + PROMPT_SECONDS if any(more) or self._busy else math.inf
        for hold in list(self.holds):
            if hold.backend in self._busy:
                wake = min(wake, hold.deadline, hold.latest_end)
            else:
                wake = min(wake, hold.due)
        return min([wake, *(left.next_try for left in self._abandoned if left.hold.backend not in self._busy)])

    def _serve(self, backend: BaseLockBackend, due: list[Hold], leftovers: list[_Abandoned]) -> None:
        if backend not in self._slow:
            self._work(backend, due, leftovers, patience=PROMPT_SECONDS)
            return
        self._busy.add(backend)

        def work() -> None:
            try:
                self._work(backend, due, leftovers, patience=PATIENT_SECONDS)
            finally:
                self._busy.discard(backend)
                self._notes.put(None)

        try:
            threading.Thread(target=work, name="angee-locks-renewal-slow", daemon=True).start()
        except RuntimeError:  # the system's limit
            self._busy.discard(backend)
            self._work(backend, due, leftovers, patience=PROMPT_SECONDS)

    def _work(self, backend: BaseLockBackend, due: list[Hold], leftovers: list[_Abandoned], patience: float) -> None:
        started = clock.now()
        for hold in due:  # the retry, should this one fail
            hold.renew_at = started + min(PROMPT_SECONDS, hold.ttl / 10)
        due.sort(key=lambda hold: hold.deadline)  # should there be more than one batch, the most pressing goes first
        try:
            for at in range(0, len(due), backend.extend_batch):
                self._extend(backend, due[at : at + backend.extend_batch], patience)
            for left in leftovers:
                self._give_up(left, patience)
        except Exception as error:
            self._slow.add(backend)
            level = logging.WARNING if isinstance(error, LockBackendError) else logging.ERROR
            logger.log(level, "Renewing the locks of %r failed: %s", backend.alias, error, exc_info=error)
        else:
            if clock.now() - started > PROMPT_SECONDS / 2:
                self._slow.add(backend)
            else:
                self._slow.discard(backend)

    def _extend(self, backend: BaseLockBackend, holds: list[Hold], patience: float) -> None:
        holds = [hold for hold in holds if not hold.ended]
        if not holds:
            return
        sent = clock.now()
        limit = min(min(hold.deadline for hold in holds), sent + patience)
        if patience > PROMPT_SECONDS:
            # On a thread of its own, with trouble before: what comes too late for the most pressing hold may come in
            # time for the others.
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
                    self._extend(backend, [hold], patience)
                except Exception:
                    logger.exception("Renewing the lock %s failed", hold.name)
            return
        for hold in holds:
            if hold.owner not in extended:
                self.lose(hold, "the backend does not know it any more")
        self._extended([hold for hold in holds if hold.owner in extended], sent)

    def _extended(self, holds: list[Hold], sent: float) -> None:
        for hold in holds:
            if hold.ended is End.LOST:
                self.abandon(hold)  # told as lost while the call was under way: it may not come back
            else:
                hold.extended(sent, hold.next_ttl())
                hold.renew_at = sent + (hold.ttl / 3 if hold.backend.leases else SESSION_WATCH_SECONDS)

    def _give_up(self, left: _Abandoned, patience: float) -> None:
        hold = left.hold
        left.later()
        try:
            hold.give_up(clock.now() + min(VERB_SECONDS, patience))
        except Exception:
            if clock.now() - left.since > GIVE_UP_SECONDS:
                self._abandoned.remove(left)
                logger.exception("A hold of %s could not be given up", hold.name)
                return
            raise
        self._abandoned.remove(left)
        hold.room.changed(hold.name)

    # Losses.

    def lose(self, hold: Hold, reason: str) -> None:
        """``hold`` has ended without its holder releasing it. Told once."""
        if hold.end(End.LOST):
            self.tell_loss(hold, reason)

    def expire(self, hold: Hold) -> None:
        """The local clock says that ``hold`` is over: its lease, or the longest time that it may last."""
        if clock.now() < hold.latest_end:
            self.lose(hold, "its lease ran out before it could be renewed")
        elif hold.end(End.LOST):
            self.abandon(hold)  # for the backend it goes on
            self.tell_loss(hold, "it was held for longer than hold_at_most")

    def tell_loss(self, hold: Hold, reason: str) -> None:
        self.forget(hold)
        held_for = clock.now() - hold.started
        logger.warning("Lost the lock %s after %.1f s: %s", hold.name, held_for, reason)
        if hold.on_lost is not None:
            hold.on_lost()
        hold.room.changed(hold.name)
        if signals.lock_lost.receivers:
            loss = functools.partial(
                _dispatcher.send,
                sender=type(hold.backend),
                key=hold.key,
                backend=hold.backend.alias,
                fencing_token=hold.fencing_token,
                held_for=held_for,
                reason=reason,
            )
            self.post(loss)  # which may start a thread, and so not in one where signals arrive

    def release_all(self, holds: Iterable[Hold] | None = None) -> None:
        """At the interpreter's exit: give up what is still held, each tried even if another fails."""
        limit = clock.now() + VERB_SECONDS
        for hold in list(self.holds if holds is None else holds):
            if hold.foreign or not hold.end(End.RELEASED):
                continue
            self.forget(hold)
            try:
                hold.give_up(min(limit, clock.now() + PROMPT_SECONDS))
            except Exception:
                logger.exception("The lock %s could not be released at exit", hold.name)


class _Dispatcher:
    """Runs the receivers of ``lock_lost``.

    They may use the ORM, which would leave a connection open in whatever thread they run in, and may be slow: so
    neither on the renewal thread nor in the caller's. The thread ends when there is nothing more to tell.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._losses: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = False

    def send(self, **loss: Any) -> None:
        self._losses.put(loss)
        with self._lock:
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="angee-locks-dispatcher", daemon=True).start()

    def _run(self) -> None:
        from django.db import connections

        while True:
            try:
                loss = self._losses.get(timeout=0.5)
            except queue.Empty:
                with self._lock:
                    if self._losses.empty():
                        self._running = False
                        return
                continue
            try:
                signals.tell(signals.lock_lost, **loss)
            except BaseException:  # a receiver that wants to end the process ends neither this thread nor that
                logger.exception("A receiver of lock_lost raised what no receiver should")
            finally:
                connections.close_all()


renewer = Renewer()
_dispatcher = _Dispatcher()
process.on_fork(in_child=renewer._clear)
process.on_fork(in_child=_dispatcher._clear)
atexit.register(renewer.release_all)
