"""This process: forks, threads, and whether it runs tests.

A hold, a connection or a thread belongs to the process that made it. What a forked child inherits is only a copy: using
or closing it would disturb the parent. So everything that is kept per process is made anew in the child, by a hook that
is registered here with :func:`on_fork`.

Python tells of a fork only if Python made it. A server that forks in C (uWSGI, an embedded interpreter) does not, so
every entry point calls :func:`check`, which compares process ids and runs the hooks that are still due.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from .log import here, logger

#: The process that the module's state belongs to.
pid = os.getpid()
#: Goes up by one in every forked child: what was made under another generation belongs to a parent.
generation = 0

#: Held while a module is imported that a thread may be the first to need: a fork waits for it. A child that is forked
#: in the middle inherits the lock of the half-imported module without the thread that releases it, and would wait for
#: ever.
importing = threading.RLock()
#: A fork goes on after so many seconds all the same.
IMPORT_SECONDS = 10.0

_before_hooks: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []
_child_hooks: list[Callable[[], object]] = []
#: What is to be undone in the parent, by the thread that forks: several may fork at once.
_paused: dict[int, list[tuple[Callable[[Any], object], Any]]] = {}


def in_test_run() -> bool:
    """Whether Django's test runner, or pytest-django, has set up its environment in this process.

    There, an idle session would keep the test database from being dropped or cloned. Looked up where it is, so that
    production does not import Django's test tools.
    """
    utils: Any = sys.modules.get("django.test.utils")
    return hasattr(getattr(utils, "_TestState", None), "saved_data")  # also while it is being imported


def on_fork(
    *,
    in_child: Callable[[], object] | None = None,
    before: Callable[[], Any] | None = None,
    in_parent: Callable[[Any], object] = lambda paused: None,
) -> None:
    """Register what a fork needs. ``in_child`` makes anew what the child may not share with its parent.

    It must not rely on ``before``, which does not run for a fork in C, and replaces mutexes instead of releasing them:
    the thread that holds one may not exist in the child. ``before`` runs in the parent, in the thread that forks, and
    what it returns is given to ``in_parent`` afterwards.
    """
    if in_child is not None:
        _child_hooks.append(in_child)
    if before is not None:
        _before_hooks.append((before, in_parent))


def check() -> None:
    """Notice that this is a forked child. Cheap: every entry point calls it."""
    if os.getpid() != pid:
        _begin_child()


def _begin_child() -> None:
    global pid, generation, importing
    pid = os.getpid()
    generation += 1
    importing = threading.RLock()
    _paused.clear()
    for hook in _child_hooks:
        try:
            hook()
        except Exception:
            logger.exception("A forked process could not reset part of its locks")


def _before_fork() -> None:
    paused = _paused[threading.get_ident()] = []
    for before, in_parent in reversed(_before_hooks):
        try:
            paused.append((in_parent, before()))
        except Exception:
            logger.exception("A fork could not be prepared for")


def _after_fork_in_parent() -> None:
    for in_parent, paused in reversed(_paused.pop(threading.get_ident(), [])):
        in_parent(paused)


def _wait_for_imports() -> Any:
    mutex = importing
    return mutex if mutex.acquire(timeout=IMPORT_SECONDS) else None


def _let_import(mutex: Any) -> None:
    if mutex is not None:
        mutex.release()


on_fork(before=_wait_for_imports, in_parent=_let_import, in_child=logger.reset)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=check)


def start_thread(run: Callable[[], object], name: str) -> bool:
    """Start a daemon thread; False if the system grants none, as at its limit or at the interpreter's exit.

    Not by threading.Thread: an exception of a signal handler in its ``start()`` leaves a thread that never runs, or
    two. A daemon, since any other is joined at the interpreter's exit, before the holds are released there.
    """

    def named() -> None:
        here.hands_over = True
        threading.current_thread().name = name
        try:
            run()
        finally:
            # Python before 3.13 keeps what current_thread() makes for a thread that threading did not start.
            getattr(threading, "_active", {}).pop(threading.get_ident(), None)

    try:
        _thread.start_new_thread(named, ())
    except RuntimeError as error:
        logger.debug("The thread %s cannot be started: %s", name, error)
        return False
    return True
