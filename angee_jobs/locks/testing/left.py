"""Locks that a test has left held: they are released, and named.

A failing test that called ``acquire()`` releases nothing, and its traceback keeps the lock alive. The next test would
be refused, and a session lock would keep the test database from being dropped.

The pytest plugin does this at each test's end by itself, and :class:`~.runner.LockTestRunner` does it for
``manage.py test``. What neither has released is released before the test databases are dropped.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING

from ..renewal import renewer

if TYPE_CHECKING:
    from ..hold import Hold

#: How long a lock that was dropped without a release may take to be released in the background, in seconds.
DROPPED_SECONDS = 0.5


def live_holds() -> set[Hold]:
    """The holds of this process that have not ended.

    This function and :func:`release` are all that this module asks of the core.
    """
    return {hold for hold in list(renewer.holds) if not hold.ended and not hold.foreign}


def release(holds: Collection[Hold]) -> None:
    """End these holds; nobody is told of a loss."""
    renewer.release_all(holds)


def release_left(who: str, before: Collection[Hold] = ()) -> list[str]:
    """Release what is held and was not held ``before``, and warn that ``who`` has left it; the names.

    A lock that was merely dropped is released in the background, and is not named.
    """
    left = live_holds().difference(before)
    if not left:
        return []
    gc.collect()
    limit = time.monotonic() + DROPPED_SECONDS
    while (left := live_holds().difference(before)) and time.monotonic() < limit:
        time.sleep(0.01)
    if not left:
        return []
    names = sorted(f"{hold.name} of {hold.backend.alias!r}" for hold in left)
    release(left)
    warnings.warn(
        f"{who} left locks held, which were released now: {', '.join(names)}. Take them in a `with` block, or call "
        f"release() in a cleanup",
        RuntimeWarning,
        stacklevel=2,
    )
    return names
