"""The process's one background thread: it runs the periodic jobs, and what others leave for it.

Started with the first hold. It sleeps until the next job is due. Finalizers, which may run at any instruction of any
thread, and interrupted callers put a callable on its queue, since neither may wait for a mutex or a server.

It asks no server itself where another backend would have to wait for that; see ``renewal.py``.
"""

from __future__ import annotations

import functools
import math
import queue
import weakref
from collections.abc import Callable
from typing import Any

from . import clock, process
from .log import logger

#: While short holds come and go, the thread looks after this many seconds by itself instead of being woken by each.
LINGER_SECONDS = 2.0
#: After how many seconds a job that failed runs again.
RETRY_SECONDS = 1.0
#: How long the dispatcher stays when there is nothing more to tell, in seconds.
DISPATCHER_SECONDS = 0.5


class Finalizer(weakref.ref[Any]):
    """Puts itself on the background thread's queue when its object is dropped, unless it is dropped itself before.

    Not ``__del__``: that is Python code, in which an exception of a signal handler would be swallowed. The callback of
    this one is the queue's own put, in C.
    """

    __slots__ = ("run",)
    run: Callable[[], object]


class Background:
    """See the module. There is one, :data:`background`."""

    def __init__(self) -> None:
        #: Each is called on the thread when it is due, and returns when it is due again, on the local clock.
        self.jobs: list[Callable[[], float]] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a forked child."""
        self._queue: queue.SimpleQueue[Finalizer | Callable[[], object] | None] = queue.SimpleQueue()
        #: ``Finalizer(target, background.put)`` puts itself there when its target is dropped.
        self.put = self._queue.put
        self.running: dict[str, object] = {}
        self.wakes_at = math.inf
        #: Of what was announced since the thread last looked, the shortest time until it is due.
        self.soonest = math.inf
        self._losses: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._dispatching: dict[str, object] = {}

    # Called from anywhere.

    def post(self, run: Callable[[], object]) -> None:
        """Call ``run`` on the thread soon. Safe in finalizers."""
        self._queue.put(run)

    def when_dropped(self, target: object, run: Callable[[], object]) -> Finalizer:
        """Call ``run`` on the thread soon after ``target`` is dropped; not if the result is dropped first."""
        finalizer = Finalizer(target, self.put)
        finalizer.run = run
        return finalizer

    def announce(self, seconds: float, due: float) -> None:
        """A job has to run at ``due``, which is in ``seconds``."""
        self.soonest = min(self.soonest, seconds)
        if not self.running:
            self.ensure_running()
        elif due < self.wakes_at:
            self._queue.put(None)

    def wake(self) -> None:
        """Run the jobs now."""
        self._queue.put(None)

    def ensure_running(self) -> None:
        """Start the thread, for callers who post without having a hold."""
        if self.running:
            return
        mine = object()
        try:
            if self.running.setdefault("thread", mine) is not mine:
                return
            if not process.start_thread(functools.partial(self._run, mine), "angee-locks-renewal"):
                self.running.clear()
                logger.error("No renewal thread can be started, so locks are not renewed")
        except BaseException:
            # Struck: whether the thread runs, is not known. If it does, it ends, and the next hold starts another.
            if self.running.get("thread") is mine:
                self.running.clear()
            raise

    # On the thread.

    def _run(self, mine: object) -> None:
        while self.running.get("thread") is mine:
            self.wakes_at = math.inf  # awake: an announcement from now on is put on the queue, or seen below
            wake = min([self._due(job) for job in self.jobs], default=math.inf)
            soonest, self.soonest = self.soonest, math.inf
            if soonest != math.inf:
                # Short holds come and go. To wake for each of them would cost more than they do; the next ones of the
                # same kind are due after this, and wake nobody.
                wake = min(wake, clock.now() + min(soonest * 0.9, LINGER_SECONDS))
            self.wakes_at = wake
            try:
                self._take(self._queue.get(timeout=None if wake == math.inf else max(0.0, wake - clock.now())))
                while True:
                    self._take(self._queue.get_nowait())
            except queue.Empty:
                pass

    def _due(self, job: Callable[[], float]) -> float:
        try:
            return job()
        except Exception:
            logger.exception("The renewal thread met an error and goes on")
            return clock.now() + RETRY_SECONDS

    def _take(self, posted: Finalizer | Callable[[], object] | None) -> None:
        # A finalizer whose maker was struck by an exception has nothing to run.
        run = getattr(posted, "run", None) if isinstance(posted, Finalizer) else posted
        if run is not None:
            try:
                run()
            except Exception:
                logger.exception("What was left for the renewal thread failed")

    # The dispatcher: a thread for signals that no caller can send. Receivers may use the ORM, which would leave a
    # connection open in the thread that they run in, and may be slow: so they run neither on the background thread nor
    # on the caller's. It ends when there is nothing more to tell.

    def dispatch(self, send: Callable[[], object]) -> None:
        """Call ``send``, which tells the receivers of a signal, on the dispatcher's thread."""
        self._losses.put(send)
        self.post(self._ensure_dispatcher)  # it may start a thread, and so not in one where signals arrive

    def _ensure_dispatcher(self) -> float:
        """Also a job: it runs again if the system granted no thread."""
        if self._losses.empty() or self._dispatching:
            return math.inf
        self._dispatching["thread"] = self
        if process.start_thread(self._dispatch, "angee-locks-dispatcher"):
            return math.inf
        self._dispatching.clear()
        return clock.now() + RETRY_SECONDS

    def _dispatch(self) -> None:
        from django.db import connections

        while True:
            try:
                send = self._losses.get(timeout=DISPATCHER_SECONDS)
            except queue.Empty:
                self._dispatching.clear()
                self.post(self._ensure_dispatcher)  # one may have been put there just now
                return
            try:
                send()
            except BaseException:  # a receiver that wants to end the process ends neither this thread nor that
                logger.exception("A receiver of a lock signal raised what no receiver should")
            finally:
                connections.close_all()


background = Background()
background.jobs.append(background._ensure_dispatcher)
process.on_fork(in_child=background.reset)
