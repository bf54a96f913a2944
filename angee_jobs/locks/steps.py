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

from . import process

if TYPE_CHECKING:
    from .hold import Hold

#: How many verbs the coroutines of this process have under way at once, for each backend.
CALLERS = 4


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
        future = _callers(self._backend()).submit(self.verb, *self.args)
        try:
            return await asyncio.wrap_future(future)
        except BaseException:
            if self.hold is not None and not future.cancelled():
                # Cancelled while the verb is under way: what comes of it is settled when it has come.
                self.hold.in_flight = future
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
