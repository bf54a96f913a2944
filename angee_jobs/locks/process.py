"""This process, as opposed to the one it may have been forked from.

A hold, a connection or a thread belongs to the process that made it. What a child inherits of them is only a copy:
using or closing it would disturb the parent. ``generation`` tells the two apart at the price of an integer compare.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

#: Goes up by one in every forked child.
generation = 0

#: Held while a module is imported that a thread may be the first to need: a fork waits for it. A child that is forked
#: in the middle inherits the lock of the half-imported module without whoever releases it, and would wait for ever.
importing = threading.RLock()
#: A fork goes on after so many seconds all the same.
IMPORT_SECONDS = 10.0
_forking: dict[int, bool] = {}


def in_test_run() -> bool:
    """Whether Django's test runner, or pytest-django, has set up its environment in this process.

    There, an idle session would keep the test database from being dropped or cloned. Looked up where it is, so that
    production does not import Django's test tools.
    """
    utils: Any = sys.modules.get("django.test.utils")
    return hasattr(getattr(utils, "_TestState", None), "saved_data")  # also while it is being imported


def _count() -> None:
    global generation
    generation += 1


def on_fork(
    *,
    before: Callable[[], object] | None = None,
    in_parent: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Register callbacks around fork, where there is a fork."""
    if hasattr(os, "register_at_fork"):
        hooks = {"before": before, "after_in_parent": in_parent, "after_in_child": in_child}
        os.register_at_fork(**{when: hook for when, hook in hooks.items() if hook is not None})


def _wait_for_imports() -> None:
    _forking[threading.get_ident()] = importing.acquire(timeout=IMPORT_SECONDS)


def _let_import() -> None:
    if _forking.pop(threading.get_ident(), False):
        importing.release()


on_fork(in_child=_count)
on_fork(before=_wait_for_imports, in_parent=_let_import, in_child=_let_import)
