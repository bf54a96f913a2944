"""The policy of a lock is written once, as generators of steps; a thread and a coroutine run them each in its way.

A step is a call of a backend's verb, or a sleep until a bell rings. A thread calls and blocks. A coroutine has the verb
called on one of a few threads of our own (never the loop's executor, which the application may fill with waiting
calls that need the lock), and sleeps without any.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from . import clock, process
from .errors import LockBackendError

if TYPE_CHECKING:
    from .hold import Hold

#: How many verbs the coroutines of this process have under way at once, for each backend.
CALLERS = 4
#: How much later than its deadline a verb may come back from its thread, in seconds.
LATE_SECONDS = 0.2


class Bell(Protocol):
    """Wakes one waiter. Rung from any thread; a ring before the wait counts."""

    def ring(self) -> None: ...


class ThreadBell:
    """A bell for a thread. SimpleQueue is C, so an exception of a signal handler cannot leave it half-way."""

    __slots__ = ("_rings",)

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        self._rings.put(None)

    def wait(self, seconds: float) -> None:
        try:
            self._rings.get(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX)))
            while True:
                self._rings.get_nowait()
        except queue.Empty:
            pass


class TaskBell:
    """A bell for a coroutine."""

    __slots__ = ("_loop", "_rung")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the waiter with it
            self._loop.call_soon_threadsafe(self._rung.set)

    async def wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(seconds, threading.TIMEOUT_MAX))):
                await self._rung.wait()
        self._rung.clear()


class Call:
    """Step: call a verb of the backend, for ``hold`` where it may win or end one."""

    __slots__ = ("args", "hold", "verb")

    def __init__(self, verb: Callable[..., Any], *args: Any, hold: Hold | None = None) -> None:
        self.verb = verb
        self.args = args
        self.hold = hold

    def run(self) -> Any:
        return self.verb(*self.args)

    def _backend(self) -> object:
        """Whose verb it is: calls of a backend that hangs must not keep those of another waiting for a thread."""
        if self.hold is not None:
            return self.hold.backend
        return getattr(self.verb, "__self__", Call)

    async def arun(self) -> Any:
        # The last argument of a verb is its deadline. It binds also a call that waits for a thread, behind others that
        # a server does not answer.
        limit = self.args[-1] if self.args and isinstance(self.args[-1], float) else None
        future = _callers(self._backend()).submit(self.verb, *self.args)
        try:
            async with asyncio.timeout(None if limit is None else max(0.0, limit - clock.now()) + LATE_SECONDS):
                return await asyncio.wrap_future(future)
        except BaseException as error:
            under_way = not future.cancelled() and not future.done()
            if self.hold is not None and under_way:
                # Nobody waits for it any more: what comes of it is settled when it has come.
                self.hold.in_flight = future
            if isinstance(error, TimeoutError):
                raise LockBackendError("The lock backend gave no answer in time", uncertain=under_way) from error
            raise


class Sleep:
    """Step: sleep until the bell rings, at most ``seconds``."""

    __slots__ = ("bell", "seconds")

    def __init__(self, bell: Any, seconds: float) -> None:
        self.bell = bell
        self.seconds = seconds

    def run(self) -> None:
        self.bell.wait(self.seconds)

    async def arun(self) -> None:
        await self.bell.wait(self.seconds)


Result = TypeVar("Result")
Steps = Generator[Call | Sleep, Any, Result]


def run(steps: Steps[Result]) -> Result:
    """Run the steps in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                # The same as step.run(), which a lock that is free saves twice.
                answer = step.verb(*step.args) if type(step) is Call else step.run()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        steps.close()


async def arun(steps: Steps[Result]) -> Result:
    """Run the steps in this task."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await step.arun()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        steps.close()


_pools: weakref.WeakKeyDictionary[object, ThreadPoolExecutor] = weakref.WeakKeyDictionary()
_pools_lock = threading.Lock()


def _callers(backend: object) -> ThreadPoolExecutor:
    pool = _pools.get(backend)
    if pool is None:
        with _pools_lock:
            pool = _pools.get(backend)
            if pool is None:
                pool = _pools[backend] = ThreadPoolExecutor(CALLERS, thread_name_prefix="angee-locks-call")
    return pool


def _forget() -> None:
    global _pools, _pools_lock
    _pools, _pools_lock = weakref.WeakKeyDictionary(), threading.Lock()


process.on_fork(in_child=_forget)
