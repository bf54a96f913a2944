"""``@locked`` for tasks: a refusal fails the task, or skips it, or lets it run again later, as asked, and is seen."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar, cast

from ..locks import Lock, LockKey, LockNotAcquiredError, lock
from ..locks.misuse import check_function, check_key

P = ParamSpec("P")
R = TypeVar("R")

ON_REFUSED = ("raise", "skip", "retry")


class Try:
    """A block over a lock that gives its refusal, or None when the lock was taken."""

    def __init__(self, held: Lock) -> None:
        self._lock = held
        self._refused: LockNotAcquiredError | None = None

    def __enter__(self) -> LockNotAcquiredError | None:
        try:
            self._lock.__enter__()
        except LockNotAcquiredError as refused:
            self._refused = refused
        return self._refused

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if self._refused is None:
            self._lock.__exit__(exc_type, exc, traceback)

    async def __aenter__(self) -> LockNotAcquiredError | None:
        try:
            await self._lock.__aenter__()
        except LockNotAcquiredError as refused:
            self._refused = refused
        return self._refused

    async def __aexit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if self._refused is None:
            await self._lock.__aexit__(exc_type, exc, traceback)


def answer(refused: LockNotAcquiredError, **more: str) -> dict[str, str]:
    """What a refused task returns: any result store can keep it, and its reader sees why nothing was done."""
    holder = refused.holder.holder if refused.holder is not None else None
    return {"refused": refused.name or "", "held_by": str(holder or "unknown")} | more


def later(delay: float) -> float:
    """The seconds after which a refused task tries again: not all at once, and up to half as long again."""
    return delay * random.uniform(1.0, 1.5)


def locked_task(
    key: LockKey | str | Callable[..., LockKey | str],
    *,
    on_refused: str,
    retry: Callable[[LockNotAcquiredError], Any],
    aretry: Callable[[LockNotAcquiredError], Awaitable[Any]],
    is_context: Callable[[Any], bool],
    options: dict[str, Any],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The decorator of all the queues. ``is_context`` knows the first argument that a queue adds by itself."""
    check_key(key, depth=2)
    if on_refused not in ON_REFUSED:
        raise ValueError(f"on_refused must be one of {', '.join(map(repr, ON_REFUSED))}, not {on_refused!r}")
    if not callable(key):
        lock(key, **options)  # a bad key or option is an error where it is written

    def block(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Try:
        if callable(key):
            own = args[1:] if args and is_context(args[0]) else args
            return Try(lock(key(*own, **kwargs), **options))
        return Try(lock(key, **options))

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        check_function(function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"@locked cannot decorate the generator function {function.__qualname__}")

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def acall(*args: P.args, **kwargs: P.kwargs) -> Any:
                async with block(args, kwargs) as refused:
                    if refused is None:
                        return await function(*args, **kwargs)
                    if on_refused == "raise":
                        raise refused
                    return answer(refused) if on_refused == "skip" else await aretry(refused)

            return cast("Callable[P, R]", acall)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            with block(args, kwargs) as refused:
                if refused is None:
                    return function(*args, **kwargs)
                if on_refused == "raise":
                    raise refused
                return answer(refused) if on_refused == "skip" else retry(refused)

        return cast("Callable[P, R]", call)

    return decorate
