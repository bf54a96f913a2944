"""What is written wrongly and would be silent: found where it is written, with what to write instead.

``@locked`` without a key takes the function for its key, so that what is queued and called is the decorator, which
returns a function and never runs the body: a task that succeeds. ``if billing.aacquire():`` without ``await`` is true.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Generator
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import markcoroutinefunction

P = ParamSpec("P")
T = TypeVar("T")

NEEDS_KEY = (
    '@locked needs the key of its lock: write @locked("billing-run"), or @locked(lambda order_id: ...) for a key that '
    "is made of the arguments"
)
BELOW = (
    "@locked stands below the decorator that makes a task, where it locks the task's body: put @locked(...) directly "
    "above def, and the queue's decorator above it"
)
#: What only the object that a queue has made of a function has: Celery, Django's tasks, Dramatiq, Huey.
_OF_A_TASK = ("apply_async", "enqueue", "send_with_options", "call_local")


def check_key(key: Any, depth: int = 1) -> None:
    """TypeError if ``key`` is the function that the caller's caller (at ``depth`` 1) decorates with a bare @locked."""
    if hasattr(key, "_entrance"):
        raise TypeError(f"{NEEDS_KEY}. It makes the lock itself, so give it the key instead of a lock.")
    if is_task(key):
        raise TypeError(f"{BELOW}. {NEEDS_KEY}.")
    if inspect.isroutine(key) and _is_decorated_by(key, sys._getframe(depth + 1)):
        raise TypeError(f"{NEEDS_KEY}.")


def check_function(function: Any) -> None:
    """TypeError if ``function`` is a queue's task, or no function at all: an argument that a bare @locked has got."""
    if is_task(function):
        raise TypeError(f"{BELOW}.")
    if not callable(function):
        raise TypeError(f"{NEEDS_KEY}. It decorates functions, and got an object of type {type(function).__name__}.")


def is_task(value: Any) -> bool:
    if inspect.isroutine(value) or isinstance(value, (str, type)):
        return False
    return any(hasattr(value, name) for name in _OF_A_TASK)


def _is_decorated_by(function: Any, frame: FrameType) -> bool:
    """Whether ``frame`` executes a line of the decorators of ``function``.

    A key function is defined elsewhere, or is a lambda. Where lines say nothing, as at a prompt, the answer is no.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not isinstance(code, CodeType) or code.co_name == "<lambda>":
        return False
    if code.co_filename != frame.f_code.co_filename or code.co_filename.startswith("<"):
        return False
    first = code.co_firstlineno  # of the first decorator
    body = min((line for _, _, line in code.co_lines() if line is not None and line > first), default=first + 1)
    return first <= frame.f_lineno < body


class Unawaited(Coroutine[Any, Any, T]):
    """A coroutine that is neither true nor false; whatever takes a coroutine takes it."""

    __slots__ = ("_coroutine", "_name")

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str) -> None:
        self._coroutine, self._name = coroutine, name

    def __bool__(self) -> bool:
        # asyncio asks too: in Python 3.12 for the text of a task, at the end of asyncio.run(), which failed by that.
        asks = str(sys._getframe(1).f_globals.get("__name__", ""))
        if inspect.getcoroutinestate(self._coroutine) != inspect.CORO_CREATED or asks.startswith("asyncio."):
            return True
        self._coroutine.close()  # the TypeError says it all: no warning that it was never awaited
        raise TypeError(f"{self._name}() answers when it is awaited: write `if await ....{self._name}():`")

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Any:
        # Python 3.12 deprecates the form with three arguments.
        return self._coroutine.throw(typ) if val is None and tb is None else self._coroutine.throw(typ, val, tb)

    def close(self) -> None:
        self._coroutine.close()


def awaited(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function: `if` on a call of it that lacks its ``await`` is a TypeError."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return Unawaited(function(*args, **kwargs), function.__name__)

    return markcoroutinefunction(call)
