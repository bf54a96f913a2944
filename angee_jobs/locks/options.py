"""The options of a lock: what they are, what they default to, and what they may be. Said here once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar

from .backends.base import MOST_PLACES, BaseLockBackend
from .types import Seconds, lease_seconds, wait_seconds

F = TypeVar("F", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """The options as callers write them, for type checkers and editors."""

    timeout: Seconds | None
    ttl: Seconds | None
    auto_extend: bool
    hold_at_least: Seconds | None
    hold_at_most: Seconds | None
    cancel_on_loss: bool
    note: str
    backend: str
    slots: int | None
    shared: bool


class LockOptions(NamedTuple):
    """The options of one lock, checked: times in seconds, None where the caller gave none.

    A tuple, since each use of ``task_lock()`` makes one: a frozen dataclass of ten fields takes four times as long.
    """

    timeout: float | None = None
    ttl: float | None = None
    auto_extend: bool = True
    hold_at_least: float | None = None
    hold_at_most: float | None = None
    cancel_on_loss: bool = False
    note: str = ""
    backend: str | BaseLockBackend = "default"
    slots: int | None = None
    shared: bool = False

    @classmethod
    def checked(cls, options: dict[str, Any]) -> LockOptions:
        """The same options, checked. TypeError for an unknown one, TypeError or ValueError for a bad time."""
        if not options.keys() <= _NAMES:
            unknown = options.keys() - _NAMES
            raise TypeError(
                f"A lock has no option {', '.join(map(repr, sorted(unknown)))}; "
                f"it takes {', '.join([*_TIMES, *sorted(_NAMES - _TIMES.keys())])}"
            )
        seconds = {name: _TIMES[name](value) for name, value in options.items() if name in _TIMES}
        checked = cls(**{**options, **seconds})
        shortest, longest = checked.hold_at_least, checked.hold_at_most
        if shortest is not None and longest is not None and shortest > longest:
            least, most = options["hold_at_least"], options["hold_at_most"]
            raise ValueError(f"hold_at_least ({least!r}) is longer than hold_at_most ({most!r})")
        slots = checked.slots
        if slots is not None:
            if not isinstance(slots, int):
                raise TypeError(f"slots must be an int, not {type(slots).__name__}: {slots!r}")
            if type(slots) is bool or not 1 <= slots <= MOST_PLACES:
                raise ValueError(f"slots must be between 1 and {MOST_PLACES}: {slots!r}")
            if checked.shared:
                raise ValueError("shared=True admits any number of holders: it cannot have slots= too")
        return checked


def _lease(name: str) -> Callable[[Seconds | None], float | None]:
    return lambda value: None if value is None else lease_seconds(value, name)


_TIMES: dict[str, Callable[[Any], float | None]] = {
    "timeout": wait_seconds,
    "ttl": _lease("ttl"),
    "hold_at_least": _lease("hold_at_least"),
    "hold_at_most": _lease("hold_at_most"),
}
_NAMES = frozenset(LockOptions._fields)
DEFAULTS = LockOptions()


def spelled_out(function: F) -> F:
    """Give ``function``, which takes ``**options``, a signature that names each of them, for ``help()``."""
    signature = inspect.signature(function)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Options.__annotations__[name].__forward_arg__,
        )
        for name, default in LockOptions._field_defaults.items()
    ]
    function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function
