"""What users see of a lock besides the lock: who holds it, and what a backend must be able to do.

Also the one place where times given by users are checked, so that a bad one is refused before anything is
acquired.
"""

from __future__ import annotations

import dataclasses
import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from .keys import LockKey

#: Seconds, or a timedelta.
Seconds = float | int | timedelta

HIDDEN = "***"
_PLAIN = (int, float)

#: A finite time above this is a mistake in units (milliseconds for seconds, say), never a plan.
LONGEST = 10 * 366 * 24 * 3600.0
#: Below this a lease would often be over before the answer that grants it has arrived.
SHORTEST_TTL = 0.01


def printable(text: str) -> str:
    """``text`` with what would do something to a terminal, or begin a new line in a log, escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Where a hold was taken: ``host``, ``pid``, ``thread`` (its name), ``task`` and ``note`` (both may be empty).

    ``ttl`` is the length that was asked for its lease, in seconds; None for a session lock. ``places`` is the ``slots``
    that it named, -1 for a shared hold, 0 for an exclusive one.
    """

    host: str
    pid: int | None
    thread: str
    task: str = ""
    note: str = ""
    ttl: float | None = None
    places: int = 0

    def __str__(self) -> str:
        where = f"{self.host} pid {self.pid} {self.thread}"
        return printable(" ".join([where, *(f"[{extra}]" for extra in (self.task, self.note) if extra)]))


@dataclasses.dataclass(frozen=True, slots=True)
class LockInfo:
    """One hold as the backend knows it; None where it cannot know.

    ``owner_id`` is ``"***"``, unless the hold's own :class:`Lock` was asked: whoever knows it can release the
    hold. ``expires_at`` is None for a session lock, which lives as long as its connection. Times are aware and
    by the backend's clock. ``slot`` is the place that the hold has, from 0 to one less than ``slots``, the number that
    its holder named; both are None for a hold without a place. ``shared`` says whether it is a shared one.

    Example::

        info = lock_info(record_lock_key("messaging.Channel", 42, "sync"))
        print(info.holder.host, info.holder.pid, info.acquired_at)
    """

    name: str
    owner_id: str = dataclasses.field(repr=False)  # also not by accident in a log
    holder: Holder | None
    acquired_at: datetime | None
    expires_at: datetime | None
    fencing_token: int | None
    backend: str
    slot: int | None = None
    slots: int | None = None
    shared: bool = False

    @property
    def place(self) -> str:
        """For people: ``place 2 of 3`` or ``shared``; empty for an exclusive hold."""
        if self.slot is None:
            return "shared" if self.shared else ""
        return f"place {self.slot + 1}" + (f" of {self.slots}" if self.slots is not None else "")


@runtime_checkable
class LockHandle(Protocol):
    """One hold of a backend that brings its own: all it must be able to do is end."""

    def release(self) -> object: ...


@runtime_checkable
class LockBackend(Protocol):
    """The least that a backend of somebody else must have for :func:`task_lock` to use it.

    ``cross_process`` says whether the exclusion reaches beyond this process; a backend without it counts as
    local to the process.
    """

    cross_process: bool

    def try_acquire(self, key: LockKey | str, *, timeout: timedelta | None = None) -> LockHandle | None: ...

    def is_held(self, key: LockKey | str) -> bool: ...


def to_seconds(value: object, what: str) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} must be seconds (int or float) or a timedelta, not {type(value).__name__}: {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = LONGEST * 2
    if math.isnan(seconds):
        raise ValueError(f"{what} must be a number of seconds, not NaN")
    return seconds


def wait_seconds(timeout: Seconds | None) -> float | None:
    """The total wait in seconds that ``timeout`` means; None for "try once, now". ``math.inf`` waits for ever."""
    if timeout is None:
        return None
    seconds = to_seconds(timeout, "timeout")
    if seconds < 0:
        raise ValueError(f"timeout must not be negative: {timeout!r}")
    if LONGEST < seconds < math.inf:
        raise ValueError(f"timeout is longer than ten years: {timeout!r}; use math.inf to wait for ever")
    return seconds


def grace_seconds(grace: Seconds) -> float:
    """How long ago, in seconds, a hold must have expired to be reaped."""
    seconds = to_seconds(grace, "grace")
    if not 0 <= seconds <= LONGEST:
        raise ValueError(f"grace must be between 0 and ten years: {grace!r}")
    return seconds


def lease_seconds(ttl: Seconds, what: str = "ttl") -> float:
    """The length of a lease in seconds; ValueError unless it is finite, positive and can work."""
    if type(ttl) in _PLAIN and SHORTEST_TTL <= ttl <= LONGEST:  # type: ignore[operator]
        return float(ttl)  # type: ignore[arg-type]
    seconds = to_seconds(ttl, what)
    if seconds <= 0:
        raise ValueError(f"{what} must be positive: {ttl!r}")
    if seconds < SHORTEST_TTL:
        raise ValueError(f"{what} is shorter than {SHORTEST_TTL} s: {ttl!r}; no lease that short can be kept")
    if seconds > LONGEST:
        raise ValueError(f"{what} is longer than ten years: {ttl!r}")
    return seconds
