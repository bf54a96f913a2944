"""How a refused caller waits.

All waiters of one process for one key stand in a line. Only the head of the line asks the backend; it sleeps until
it is rung: by a release in this process, by the backend's one watcher thread, which hears or looks for releases in
others, or by the fallback interval, which bounds what a lost wake-up costs. The others sleep until they are the head.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import clock
from .backends.base import VERB_SECONDS, BaseLockBackend, Grant
from .concurrency import Bell, Call, Sleep, Steps, ThreadBell
from .errors import LockBackendError
from .process import in_test_run
from .renewal import Dropped, renewer

if TYPE_CHECKING:
    from .hold import Hold
    from .transactions import Binding

logger = logging.getLogger("angee_jobs.locks")

#: What a lost wake-up costs at most, in seconds.
FALLBACK_SECONDS = 1.0
#: Whoever is refused although the lock had looked free looks again after this time, in seconds: who was quicker, and
#: for how long it is held, is not known yet.
AGAIN_SECONDS = 0.1
#: How long the watcher stays when nobody waits any more, in seconds.
LINGER_SECONDS = 5.0
#: A call that was given less time than this and did not make it says nothing about the health of the backend.
FAIR_CHANCE_SECONDS = 0.25


class Line:
    """The waiters of one key in this process, first come first."""

    __slots__ = ("bells", "calling_since", "places")

    def __init__(self) -> None:
        self.bells: collections.deque[Bell] = collections.deque()
        #: When the head's call began that has not returned yet, on the local clock.
        self.calling_since: float | None = None
        #: Take a waiter out of the line that is gone without having left it: an exception can strike anywhere.
        self.places: dict[Bell, Dropped] = {}

    def at_head(self, bell: Bell) -> bool:
        return bool(self.bells) and self.bells[0] is bell


class Place:
    """What a waiter keeps while it stands in line."""

    __slots__ = ("__weakref__",)


class WaitingRoom:
    """The lines for one backend, and the thread that watches it while somebody waits."""

    def __init__(self, backend: BaseLockBackend) -> None:
        self.backend = backend
        self.lines: dict[str, Line] = {}
        #: The holds that wait for a transaction of this process to end; see transactions.py.
        self.bindings: dict[str, Binding] = {}
        # Re-entrant, since a signal handler that uses locks may interrupt this very thread in here.
        self._mutex = threading.RLock()
        self._watched = False
        # Not a threading.Event, which is Python: a signal handler's exception inside it leaves its lock taken.
        self._somebody = ThreadBell()

    def join(self, name: str, bell: Bell, place: Place) -> Line:
        """Stand in the line for ``name``, for as long as somebody has ``place``."""
        renewer.ensure_running()
        with self._mutex:
            line = self.lines.get(name)
            if line is None:
                line = self.lines[name] = Line()
            line.places[bell] = renewer.when_dropped(place, functools.partial(self.leave, name, bell))
            line.bells.append(bell)
        return line

    def leave(self, name: str, bell: Bell) -> None:
        """Leave the line, wherever one stands in it; harmless if one does not."""
        with self._mutex:
            line = self.lines.get(name)
            if line is None or bell not in line.places:
                return
            # Each step may be the last one before an exception strikes; then this is called again, and does the rest.
            if line.at_head(bell):
                line.calling_since = None
            with contextlib.suppress(ValueError):
                line.bells.remove(bell)
            if line.bells:
                line.bells[0].ring()
            else:
                self.lines.pop(name, None)
                if not self.lines and in_test_run():  # at once, or its session keeps the test database from going
                    self.backend.stop_watching()
            line.places.pop(bell, None)

    def changed(self, name: str | None) -> None:
        """``name`` may have come free; None: any of them."""
        names = [name] if name is not None else list(self.lines)
        for each in names:
            line = self.lines.get(each)
            if line is not None:
                try:
                    line.bells[0].ring()
                except IndexError:  # the last one is just leaving
                    pass

    def watch(self) -> None:
        """See that somebody hears of releases in other processes."""
        if self.backend.push is None:
            return
        self._somebody.ring()
        if not self._watched:
            renewer.post(self._start_watching)  # where no signal arrives while the thread starts

    def _start_watching(self) -> None:
        with self._mutex:
            if self._watched or not self.lines:
                return
            threading.Thread(target=self._watch, name="angee-locks-watcher", daemon=True).start()
            self._watched = True

    def _watch(self) -> None:
        pause = 0.05
        while True:
            if not self.lines:
                self._somebody.wait(0.0 if in_test_run() else LINGER_SECONDS)
                with self._mutex:
                    if not self.lines:
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


def wait_in_line(
    room: WaitingRoom,
    hold: Hold,
    deadline: float,
    bell: Bell,
    attempt: Callable[[float], Grant | None],
) -> Steps[Grant | None]:
    """Wait for a lock that was just refused: its grant, or None at ``deadline``.

    ``attempt`` makes one try for ``hold``, given a deadline of its own.
    """
    name = hold.name
    place = Place()
    line = room.join(name, bell, place)
    try:
        while not line.at_head(bell):
            yield Sleep(bell, deadline - clock.now())
            if not line.at_head(bell) and clock.now() >= deadline:
                since = line.calling_since
                if since is not None and clock.now() - since >= FAIR_CHANCE_SECONDS:
                    raise LockBackendError(f"The backend did not answer in time about {name}", name=name)
                return None
        room.watch()
        while True:
            try:
                started = line.calling_since = clock.now()
                remaining = yield Call(room.backend.remaining, name, min(deadline, started + VERB_SECONDS))
                if remaining is None:
                    started = line.calling_since = clock.now()
                    grant: Grant | None = yield Call(attempt, min(deadline, started + VERB_SECONDS), hold=hold)
                    if grant is not None:
                        return grant
            except LockBackendError as error:
                # Cut off by the end of the wait: what the backend said before is the answer.
                if clock.now() >= deadline and deadline - started < FAIR_CHANCE_SECONDS:
                    renewer.take_back(hold, error)  # it may yet be granted, and nobody would release it
                    return None
                raise
            line.calling_since = None
            pause = min(deadline - clock.now(), AGAIN_SECONDS if remaining is None else FALLBACK_SECONDS)
            if pause <= 0:
                return None
            if remaining is not None:
                pause = min(pause, max(remaining, 0.001))
            yield Sleep(bell, pause)
    finally:
        room.leave(name, bell)


def room_of(backend: BaseLockBackend) -> WaitingRoom:
    """The one waiting room of a backend instance."""
    room: WaitingRoom | None = backend.__dict__.get("_room")
    if room is None:
        room = backend.__dict__.setdefault("_room", WaitingRoom(backend))
    return room
