"""The package's logger: nothing that a project does with the records can break a lock, or keep it from being renewed.

A filter or a handler may raise, which ends the log call's caller. (Seen: the background thread ended, and no lock of
the process was renewed any more.) Or it may hang, as one that sends mail does. (Seen: the leases ran out meanwhile.)
So the records of the package's own threads are handled on a thread that is there for that alone.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import logging
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

#: How many records may wait for a handler that hangs; later ones are dropped.
MOST_RECORDS = 1000
#: How long the thread stays when there is nothing more to handle, and how long the interpreter's exit waits for it.
LINGER_SECONDS = EXIT_SECONDS = 0.5


class _Here(threading.local):
    hands_over = False


#: Of the package's own threads: their records are handled elsewhere.
here = _Here()


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """See the module. There is one, :data:`logger`."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("angee_jobs.locks"))
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a forked child."""
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._running: dict[str, object] = {}

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        try:
            if not self.isEnabledFor(level):
                return
            if not here.hands_over:
                self.logger.log(level, msg, *args, stacklevel=2, **kwargs)
                return
            path, line, function, _ = self.logger.findCaller(stacklevel=2)
            error: Any = kwargs.get("exc_info")
            if isinstance(error, BaseException):
                error = (type(error), error, error.__traceback__)
            elif error:
                error = sys.exc_info()
            record = self.logger.makeRecord(self.logger.name, level, path, line, msg, args, error, function)
            if self._calls.qsize() < MOST_RECORDS:
                self._calls.put(functools.partial(self.logger.handle, record))
            self._ensure_running()
        except Exception:
            _complain()

    def _ensure_running(self) -> None:
        if self._running.setdefault("thread", mine := object()) is mine:
            try:
                _thread.start_new_thread(self._run, (self._calls, self._running))
            except RuntimeError:  # none is granted; the next record tries again
                self._running.clear()

    def _run(self, calls: queue.SimpleQueue[Callable[[], object]], running: dict[str, object]) -> None:
        threading.current_thread().name = "angee-locks-log"
        try:
            while True:
                try:
                    calls.get(timeout=LINGER_SECONDS)()
                except queue.Empty:
                    break
                except BaseException:
                    _complain()
        finally:
            # Python before 3.13 keeps what current_thread() makes for a thread that threading did not start.
            getattr(threading, "_active", {}).pop(threading.get_ident(), None)
            running.clear()
        if not calls.empty():  # one was put there just now
            self._ensure_running()

    def flush(self, seconds: float = EXIT_SECONDS) -> None:
        """Wait until the records have been handled, but no longer than ``seconds``."""
        handled = threading.Event()
        if self._running:
            self._calls.put(handled.set)
            handled.wait(seconds)


def _complain() -> None:
    """As logging's own handlers do."""
    if logging.raiseExceptions:
        with contextlib.suppress(Exception):
            traceback.print_exc()


logger = SafeLogger()
atexit.register(logger.flush)  # before logging's own, which was registered earlier and closes the handlers
