"""What the tests of secrets have in common: the owner ids that were made, and a cycle of every operation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import angee_jobs.locks
from angee_jobs.locks import acquiring as policy_module
from angee_jobs.locks import (
    attach_lock,
    force_release,
    held_locks,
    lock,
    lock_backends,
    lock_info,
    reap_expired_locks,
    task_lock_is_held,
)
from angee_jobs.locks import hold as hold_module
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.renewal import renewer
from tests.support.admin_page import URL, logged_in, no_users  # noqa: F401  (a fixture)

PACKAGE = str(Path(angee_jobs.locks.__file__).parent)
KEY = "of secrets"


class Secrets:
    """Every owner id that was made, and whether a text has one in it."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def new(self, places: int = 0) -> Any:
        made = _new_owner_id(places)
        self.ids.append(str(made))
        return made

    def in_text(self, text: str) -> list[str]:
        return [each for each in self.ids if each in text]


_new_owner_id = hold_module.new_owner_id


@pytest.fixture(name="secrets")
def made_ids() -> Iterator[Secrets]:
    found = Secrets()
    with (
        mock.patch.object(hold_module, "new_owner_id", found.new),
        mock.patch.object(policy_module, "new_owner_id", found.new),
    ):
        yield found
    assert found.ids, "the test has made holds"


class Kept(logging.Handler):
    """What was logged, as a formatter would write it, and with its arguments."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts += [self.format(record), repr(record.args), repr(vars(record))]


@pytest.fixture(name="logged")
def everything_logged() -> Iterator[Kept]:
    """All loggers at DEBUG, also the drivers'."""
    kept = Kept()
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    loggers += [
        logging.getLogger(name) for name in ("psycopg", "psycopg.pool", "redis", "asyncio", "django.db.backends")
    ]
    before = [(each, each.level, each.disabled) for each in loggers]
    for each in loggers:
        each.setLevel(logging.DEBUG)
        each.disabled = False
        each.addHandler(kept)
    yield kept
    for each, level, disabled in before:
        each.setLevel(level)
        each.disabled = disabled
        each.removeHandler(kept)


def cycle(at: str, see: Callable[[object], None]) -> None:
    """Every operation, with success and without; ``see`` gets what comes of it, errors too."""

    def tried(call: Callable[[], object]) -> None:
        try:
            see(call())
        except Exception as error:
            see(error)

    first, second = lock(KEY, note="a note", backend=at), lock(KEY, backend=at)
    tried(first.acquire)
    tried(second.acquire)
    tried(lambda: second.acquire(0.05))
    tried(second.__enter__)
    for ask in (first.info, lambda: lock_info(KEY, backend=at), lambda: [*held_locks(backend=at)], first.extend):
        tried(ask)
    see([first, first._hold, Extension("a", first.owner_id or "", 1.0), vars(first), lock_backends[at], renewer.holds])
    detached = ""
    try:
        detached = first.detach()
    except Exception as error:
        see(error)
    tried(lambda: attach_lock(KEY, "nobody", backend=at))
    if detached:
        attached = attach_lock(KEY, str(detached), backend=at)
        see(attached)
        tried(lambda: attach_lock(KEY, str(detached), backend=at))
    tried(lambda: force_release(KEY, reason="a test", backend=at))
    tried(first.release)
    tried(first.check)
    tried(lambda: reap_expired_locks(backend=at))
    third = lock(KEY, hold_at_most=60, backend=at).__enter__()
    see(third)
    assert third._hold is not None
    renewer.lose(third._hold, "a test")
    tried(lambda: third.__exit__(None, None, None))
    tried(lambda: force_release(KEY, backend=at))
    tried(lambda: task_lock_is_held(KEY, backend=at))
