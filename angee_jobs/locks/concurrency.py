"""The policy is written once, as generators of operations; a thread and a coroutine run them each in its way.

An operation is a call of the backend, or a sleep until a waker wakes. A thread calls and blocks. A coroutine has the
call made on one of a few threads of our own (never the loop's executor, which the application may fill with waiting
calls that need the lock), and sleeps without any.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from . import clock, process
from .errors import LockBackendError
from .hold import Hold

#: How many calls the coroutines of this process have under way at once, for each backend.
CALLERS = 4
#: How much later than its deadline a call may come back from its thread, in seconds.
LATE_SECONDS = 0.2


class Waker(Protocol):
    """Wakes one waiter. Called from any thread; a call before the wait counts."""

    def wake(self) -> None: ...


class ThreadWaker:
    """Wakes a thread. SimpleQueue is C, so an exception of a signal handler cannot leave it half-way."""

    __slots__ = ("_wakes",)

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        self._wakes.put(None)

    def wait(self, seconds: float) -> None:
        try:
            self._wakes.get(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX)))
            while True:
                self._wakes.get_nowait()
        except queue.Empty:
            pass


class TaskWaker:
    """Wakes a coroutine."""

    __slots__ = ("_loop", "_woken")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the waiter with it
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(seconds, threading.TIMEOUT_MAX))):
                await self._woken.wait()
        self._woken.clear()


class Call(functools.partial[Any]):
    """Call an operation of the backend; its last argument is its deadline. Made in C: every acquire makes one."""

    #: The hold that it may win or end.
    hold: Hold | None = None

    @classmethod
    def of(cls, hold: Hold, call: Callable[..., Any], *args: Any) -> Call:
        made = cls(call, *args)
        made.hold = hold
        return made

    def _backend(self) -> object:
        """Whose call it is: those of a backend that hangs must not keep those of another waiting for a thread."""
        if self.hold is not None:
            return self.hold.backend
        return getattr(self.func, "__self__", Call)

    async def arun(self) -> Any:
        # The deadline also covers time spent queued for a worker thread.
        limit = self.args[-1] if self.args and isinstance(self.args[-1], float) else None
        dropped: list[bool] = []
        try:
            future = _callers(self._backend()).submit(lambda: None if dropped else self())
        except RuntimeError as error:  # no thread is granted, but one that is there already may have begun
            dropped.append(True)
            raise LockBackendError("The system grants no thread to ask the lock backend", uncertain=True) from error
        try:
            async with asyncio.timeout(None if limit is None else max(0.0, limit - clock.now()) + LATE_SECONDS):
                return await asyncio.wrap_future(future)
        except BaseException as error:
            under_way = not future.cancelled() and not future.done()
            if self.hold is not None and under_way:
                # Its caller does not wait any more: the background thread releases what it wins, when it has.
                self.hold.in_flight = future
            if isinstance(error, TimeoutError):
                raise LockBackendError("The lock backend gave no answer in time", uncertain=under_way) from error
            raise


class Sleep:
    """Sleep until the waker wakes, at most ``seconds``."""

    __slots__ = ("seconds", "waker")

    def __init__(self, waker: Any, seconds: float) -> None:
        self.waker = waker
        self.seconds = seconds

    def __call__(self) -> None:
        self.waker.wait(self.seconds)

    async def arun(self) -> None:
        await self.waker.wait(self.seconds)


Result = TypeVar("Result")
Operations = Generator[Call | Sleep, Any, Result]


def run(operations: Operations[Result]) -> Result:
    """Run the operations in this thread."""
    try:
        operation = next(operations)
        while True:
            try:
                answer = operation()
            except BaseException as error:
                operation = operations.throw(error)
            else:
                operation = operations.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        operations.close()


async def arun(operations: Operations[Result]) -> Result:
    """Run the operations in this task."""
    try:
        operation = next(operations)
        while True:
            try:
                answer = await operation.arun()
            except BaseException as error:
                operation = operations.throw(error)
            else:
                operation = operations.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        operations.close()


class Canceller:
    """Cancels the task that made it when the lock is lost, and tells that cancellation from any other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._armed = True
        self._cancelled = False

    def __call__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._armed and not self._cancelled and self._task is not None:
            self._cancelled = self._task.cancel("The lock was lost")

    def disarm(self, exc: BaseException | None) -> bool:
        """The block is left: take our cancellation back; True if ``exc`` is that one, and no other."""
        self._armed = False
        if not self._cancelled or self._task is None:
            return False
        return self._task.uncancel() == 0 and isinstance(exc, asyncio.CancelledError)


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


def _reset() -> None:
    global _pools, _pools_lock
    _pools, _pools_lock = weakref.WeakKeyDictionary(), threading.Lock()


process.on_fork(in_child=_reset)
