"""How a refused caller waits.

All waiters of one process for one key stand in a queue. Only its head asks the backend; it sleeps until it is woken: by
a release in this process, by the backend's one watcher thread, which hears or looks for releases in others, or by the
fallback interval, which bounds what a lost wake-up costs. The others sleep until they are the head.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable

from django.core.exceptions import SynchronousOnlyOperation

from . import clock, process
from .backends.base import OPERATION_SECONDS, BaseLockBackend, Grant
from .background import Finalizer, background
from .concurrency import Call, Operations, Sleep, ThreadWaker, Waker
from .errors import LockBackendError
from .hold import Hold
from .log import logger
from .process import in_test_run
from .renewal import renewer

#: What a lost wake-up costs at most, in seconds.
FALLBACK_SECONDS = 1.0
#: A head of the queue that has done nothing for this long is passed over, in seconds: its event loop is blocked or
#: closed. (Seen: a free lock that no waiter got.) More than the fallback, for which a healthy one sleeps.
SILENT_SECONDS = 1.5
#: A waiter that is refused although the lock had looked free looks again after this time, in seconds: who was quicker,
#: and for how long it is held, is not known yet.
AGAIN_SECONDS = 0.1
#: How long the watcher stays when there is no waiter left, in seconds.
LINGER_SECONDS = 5.0
#: A call that was given less time than this and did not make it says nothing about the health of the backend.
FAIR_CHANCE_SECONDS = 0.25


class Position:
    """A waiter's position in its queue: it leaves when this is dropped, as an exception can strike anywhere."""

    __slots__ = ("__weakref__",)


class WaitQueue:
    """The waiters of one key in this process, first come first."""

    __slots__ = ("active_at", "calling_since", "positions", "wakers")

    def __init__(self) -> None:
        self.wakers: collections.deque[Waker] = collections.deque()
        #: When the head last did something, on the local clock.
        self.active_at = clock.now()
        #: When the head's call began that has not returned yet, on the local clock.
        self.calling_since: float | None = None
        self.positions: dict[Waker, Finalizer] = {}

    def at_head(self, waker: Waker) -> bool:
        return bool(self.wakers) and self.wakers[0] is waker


class Waiters:
    """The wait queues for one backend, and the thread that watches it while there are waiters."""

    def __init__(self, backend: BaseLockBackend) -> None:
        self.backend = backend
        self.generation = process.generation
        self.queues: dict[str, WaitQueue] = {}
        # Re-entrant, since a signal handler that uses locks may interrupt this very thread in here.
        self._mutex = threading.RLock()
        self._watched = False
        # Not a threading.Event, which is Python: a signal handler's exception inside it leaves its lock taken.
        self._joined = ThreadWaker()

    def join(self, name: str, waker: Waker, position: Position) -> WaitQueue:
        """Join the queue for ``name``, until ``position`` is dropped or :meth:`leave` is called."""
        background.ensure_running()
        with self._mutex:
            queue = self.queues.get(name)
            if queue is None:
                queue = self.queues[name] = WaitQueue()
                _waiting[self] = None
                background.announce(SILENT_SECONDS, clock.now() + SILENT_SECONDS)
            queue.positions[waker] = background.when_dropped(position, functools.partial(self.leave, name, waker))
            queue.wakers.append(waker)
        return queue

    def leave(self, name: str, waker: Waker) -> None:
        """Leave the queue from any position; harmless for a waiter that is not in it."""
        with self._mutex:
            queue = self.queues.get(name)
            if queue is None or waker not in queue.positions:
                return
            # Each step may be the last one before an exception strikes; then this is called again, and does the rest.
            self._remove(name, queue, waker)
            # A waiter that was passed over still has its position, and joins again.
            if len(queue.positions) == 1:
                self.queues.pop(name, None)
                if not self.queues:
                    _waiting.pop(self, None)
                    if in_test_run():  # at once, or its session keeps the test database from going
                        self.backend.stop_watching()
            queue.positions.pop(waker, None)

    def _remove(self, name: str, queue: WaitQueue, waker: Waker) -> None:
        if queue.at_head(waker):
            queue.calling_since = None
            queue.active_at = clock.now()
        with contextlib.suppress(ValueError):
            queue.wakers.remove(waker)
        if queue.wakers:
            queue.wakers[0].wake()

    def rejoin(self, name: str, waker: Waker) -> WaitQueue | None:
        """Join again behind the others, if the waiter had been passed over."""
        with self._mutex:
            queue = self.queues.get(name)
            if queue is not None and waker in queue.positions and waker not in queue.wakers:
                queue.wakers.append(waker)
            return queue

    def pass_over_silent(self) -> None:
        """Let the next waiter be the head where the head does nothing. Called about once a second."""
        for name, queue in list(self.queues.items()):
            longest = SILENT_SECONDS if queue.calling_since is None else SILENT_SECONDS + OPERATION_SECONDS
            if len(queue.wakers) > 1 and clock.now() - queue.active_at > longest:
                with self._mutex:
                    if queue.wakers:
                        self._remove(name, queue, queue.wakers[0])

    def changed(self, name: str | None) -> None:
        """``name`` may have come free, or any lock if it is None."""
        names = [name] if name is not None else list(self.queues)
        for each in names:
            queue = self.queues.get(each)
            if queue is not None:
                try:
                    queue.wakers[0].wake()
                except IndexError:  # the last one is just leaving
                    pass

    def watch(self) -> None:
        """See that this process hears of releases in others."""
        if self.backend.push is None:
            return
        self._joined.wake()
        if not self._watched:
            background.post(self._start_watching)  # where no signal arrives while the thread starts

    def _start_watching(self) -> None:
        with self._mutex:
            if not self._watched and self.queues:
                self._watched = process.start_thread(self._watch, "angee-locks-watcher")

    def _watch(self) -> None:
        pause = 0.05
        while True:
            if not self.queues:
                self._joined.wait(0.0 if in_test_run() else LINGER_SECONDS)
                with self._mutex:
                    if not self.queues:
                        self._watched = False
                        self.backend.stop_watching()
                        return
            try:
                changed = self.backend.wait_for_change(FALLBACK_SECONDS)
                pause = 0.05
            except Exception as error:
                # The head asks the backend itself at every fallback, and tells its caller what is wrong.
                logger.debug("Watching %r failed: %s", self.backend.alias, error)
                time.sleep(pause)
                pause = min(pause * 2, FALLBACK_SECONDS)
                continue
            if changed is None:
                self.changed(None)
            else:
                for name in changed:
                    self.changed(name)


def wait_for_turn(
    waiters: Waiters,
    hold: Hold,
    deadline: float,
    waker: Waker,
    attempt: Callable[[float], Grant | None],
) -> Operations[Grant | None]:
    """Wait for a lock that was just refused: its grant, or None at ``deadline``.

    ``attempt`` makes one attempt for ``hold``, given a deadline of its own.
    """
    if isinstance(waker, ThreadWaker):
        _refuse_in_event_loop(hold.name)
    name = hold.name
    sharing = (hold.places,) if waiters.backend.most_places else ()  # a backend of others may not know of places
    position = Position()
    queue = waiters.join(name, waker, position)
    try:
        watching = False
        while True:
            while not queue.at_head(waker):
                yield Sleep(waker, deadline - clock.now())
                queue = waiters.rejoin(name, waker) or queue
                if not queue.at_head(waker) and clock.now() >= deadline:
                    since = queue.calling_since
                    if since is not None and clock.now() - since >= FAIR_CHANCE_SECONDS:
                        raise LockBackendError(f"The backend did not answer in time about {name}", name=name)
                    return None
            if not watching:
                watching = True
                waiters.watch()
            try:
                started = queue.active_at = queue.calling_since = clock.now()
                limit = min(deadline, started + OPERATION_SECONDS)
                remaining = yield Call(waiters.backend.remaining, name, limit, *sharing)
                if remaining is None:
                    started = queue.calling_since = clock.now()
                    grant: Grant | None = yield Call.of(hold, attempt, min(deadline, started + OPERATION_SECONDS))
                    if grant is not None:
                        return grant
            except LockBackendError as error:
                # Cut off by the end of the wait: what the backend said before is the answer.
                if clock.now() >= deadline and deadline - started < FAIR_CHANCE_SECONDS:
                    if error.uncertain:
                        renewer.abandon(hold)  # it may yet be granted, and no caller would release it
                    return None
                raise
            if queue.at_head(waker):
                queue.calling_since = None
                queue.active_at = clock.now()
            pause = min(deadline - clock.now(), AGAIN_SECONDS if remaining is None else FALLBACK_SECONDS)
            if pause <= 0:
                return None
            if remaining is not None:
                pause = min(pause, max(remaining, 0.001))
            yield Sleep(waker, pause)
            queue = waiters.rejoin(name, waker) or queue
    finally:
        waiters.leave(name, waker)


def _refuse_in_event_loop(name: str) -> None:
    """Django's ORM refuses to block an event loop, and so does a lock that would have to wait for its holder there."""
    if asyncio._get_running_loop() is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise SynchronousOnlyOperation(
            f"The lock {name} is taken, and to wait for it here would block the event loop, perhaps with its holder. "
            f"Use async with (or aacquire()), or sync_to_async."
        )


def waiters_of(backend: BaseLockBackend) -> Waiters:
    """The wait queues of a backend instance in this process."""
    waiters: Waiters | None = backend.waiters
    if waiters is None or waiters.generation != process.generation:  # an instance that was kept over a fork
        with _making:
            waiters = backend.waiters
            if waiters is None or waiters.generation != process.generation:
                waiters = backend.waiters = Waiters(backend)
    return waiters


#: Who has waiters; empty almost always.
_waiting: dict[Waiters, None] = {}


def _look_for_silent() -> float:
    for waiters in list(_waiting):
        waiters.pass_over_silent()
    return clock.now() + FALLBACK_SECONDS / 2 if _waiting else math.inf


def _reset() -> None:
    global _making
    _making = threading.RLock()
    _waiting.clear()


_making = threading.RLock()
background.jobs.append(_look_for_silent)
process.on_fork(in_child=_reset)
