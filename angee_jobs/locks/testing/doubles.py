"""Doubles for tests of code that takes locks: locks that stay in the process, another holder, a loss.

They need no server. Only :func:`local_locks` changes a setting; the others work on the backend that the test uses.

Example::

    class BillingTest(LocalLocksMixin, TestCase):
        def test_is_locked(self):
            with assert_locked("billing-run"):
                run_billing()

        def test_leaves_it_to_the_other(self):
            with held_by_other("billing-run"), self.assertRaises(LockNotAcquiredError):
                run_billing()

        def test_stops_when_the_lock_is_lost(self):
            with mock.patch("shop.billing.send", side_effect=lambda bill: lose("billing-run")):
                with self.assertRaises(LockLostError):
                    run_billing()
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
import unittest
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from django.test import override_settings
from django.utils.module_loading import import_string

from .. import clock
from ..backends.base import OPERATION_SECONDS, BaseLockBackend, Grant, Record
from ..backends.local import LocalLockBackend, _Lease
from ..backends.third_party import HandleBackend
from ..conf import SETTING, configuration, lock_backends
from ..hold import Hold, new_owner_id
from ..keys import LockKey, as_lock_key
from ..lock import Lock
from ..renewal import renewer
from ..signals import lock_acquired, lock_lost
from .left import live_holds, release

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object  # so that no test runner takes the mixin itself for a test case

#: The lease of :class:`OtherHolder`, in seconds: longer than a test, and not for ever if the process is killed.
LONG = 600.0
#: How long lose() waits for the receivers of lock_lost, in seconds.
TOLD_SECONDS = 5.0


class LocalSessionLocks(LocalLockBackend):
    """Stands in for a backend of session locks: holds do not end by themselves, and cannot move to another process."""

    leases: ClassVar[bool] = False

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        grant = super().acquire(name, owner, math.inf, holder, deadline)
        return None if grant is None else dataclasses.replace(grant, expires_at=None)

    def _record(self, name: str, lease: _Lease) -> Record:
        return dataclasses.replace(super()._record(name, lease), expires_at=None, expires_in=None)

    def list_held(self, deadline: float) -> Iterator[Record]:
        with self._mutex:
            return iter(self._records())


@contextlib.contextmanager
def local_locks() -> Iterator[None]:
    """Inside the block, every alias of ``ANGEE_JOBS_LOCKS`` is a backend inside this process, on which no lock is held.

    An alias of session locks still refuses what only a lease can do. The end of the block releases what is still held,
    and reports no loss. Not for tests of several processes.

    Example::

        with local_locks():
            run_billing()
    """
    with override_settings(**{SETTING: {alias: _double(entry) for alias, entry in configuration().items()}}):
        try:
            yield
        finally:
            mine = {
                operations
                for operations in map(lock_backends.operations, lock_backends)
                if isinstance(operations, LocalLockBackend)
            }
            release([hold for hold in live_holds() if hold.backend in mine])


def _double(entry: dict[str, Any]) -> dict[str, Any]:
    """The setting of the local backend that stands in for that of ``entry``."""
    double = LocalLockBackend if getattr(import_string(entry["BACKEND"]), "leases", True) else LocalSessionLocks
    return {"BACKEND": f"{double.__module__}.{double.__qualname__}", "NAMESPACE": entry.get("NAMESPACE", "")}


class LocalLocksMixin(_Base):
    """Puts :func:`local_locks` around each test of a class. Name it before ``TestCase`` or ``TransactionTestCase``.

    It begins before ``setUp`` and ends after the last cleanup. ``setUpClass`` and ``setUpTestData`` run outside.

    Example::

        class BillingTest(LocalLocksMixin, TestCase): ...
    """

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        with local_locks():
            return super().run(result)


class OtherHolder:
    """The holder of the lock in a :func:`held_by_other` block."""

    def __init__(self, key: LockKey, backend: BaseLockBackend) -> None:
        self._name = key.name
        self._backend = backend
        self._owner = new_owner_id()
        holder = json.dumps({"host": "another-host", "pid": None, "thread": "held_by_other()"})
        deadline = clock.now() + OPERATION_SECONDS
        if isinstance(backend, HandleBackend):
            granted = backend.acquire_within(key, self._owner, None)
        else:
            granted = backend.acquire(self._name, self._owner, LONG, holder, deadline)
        if granted is None:
            raise AssertionError(f"The lock {key.name} is held already, so held_by_other() cannot take it")

    def release(self) -> bool:
        """Release the lock before the end of the block; False if it is not held any more."""
        released = self._backend.release(self._name, self._owner, clock.now() + OPERATION_SECONDS)
        self._backend.changed(self._name)
        return released


@contextlib.contextmanager
def held_by_other(key: LockKey | str, *, backend: str = "default") -> Iterator[OtherHolder]:
    """Inside the block, another holder has ``key``, and every try is refused.

    Yields that :class:`OtherHolder`; its ``release()`` lets a waiter in before the end of the block. Its taking and
    releasing send no signals. AssertionError if the lock is held already.

    Example::

        with held_by_other("billing-run"), self.assertRaises(LockNotAcquiredError):
            run_billing()
    """
    other = OtherHolder(as_lock_key(key), lock_backends.operations(backend))
    try:
        yield other
    finally:
        other.release()


def lose(lock: Lock | LockKey | str, *, backend: str = "default") -> None:
    """Make a hold of this process lost, as if its lease had run out. Other holders can take the lock at once.

    ``lock`` is a :class:`~angee_jobs.locks.Lock`, or a key, for code without a Lock object (``task_lock``,
    ``@locked``). Returns when the receivers of ``lock_lost`` have been called. AssertionError if this process does
    not hold the lock.

    Example::

        with lock("billing-run") as held:
            lose(held)
            held.check()  # LockLostError
    """
    hold = lock._hold if isinstance(lock, Lock) else _hold_of(as_lock_key(lock), backend)
    if hold is None or hold.ended or hold.foreign:
        raise AssertionError(f"The lock {_name(lock)} is not held in this process, so it cannot be lost")
    told = threading.Event()

    def last(fencing_token: int | None, key: LockKey, **kwargs: Any) -> None:
        if fencing_token == hold.fencing_token and key == hold.key:
            told.set()

    lock_lost.connect(last)  # receivers are called in the order in which they were connected
    try:
        hold.backend.release(hold.name, hold.owner, clock.now() + OPERATION_SECONDS)
        renewer.lose(hold, "lose() played its loss")
        told.wait(TOLD_SECONDS)
    finally:
        lock_lost.disconnect(last)


def _hold_of(key: LockKey, backend: str) -> Hold | None:
    operations = lock_backends.operations(backend)
    return next((hold for hold in live_holds() if hold.backend is operations and hold.name == key.name), None)


def _name(lock: Lock | LockKey | str) -> str:
    return lock.name if isinstance(lock, Lock) else as_lock_key(lock).name


@contextlib.contextmanager
def assert_locked(key: LockKey | str, *, backend: str = "default") -> Iterator[None]:
    """AssertionError unless ``key`` was taken inside the block, in any thread of this process.

    To check that one call is made while the lock is held, mock that call, and let the mock ask
    ``task_lock_is_held(key)``.

    Example::

        with assert_locked(record_lock_key("messaging.Channel", 42, "sync")):
            sync_channel(42)
    """
    wanted = as_lock_key(key)
    taken: list[tuple[str, str]] = []

    def note(key: LockKey, backend: str, **kwargs: Any) -> None:
        taken.append((key.name, backend))

    lock_acquired.connect(note)
    try:
        yield
    finally:
        lock_acquired.disconnect(note)
    if (wanted.name, backend) not in taken:
        others = ", ".join(f"{name} of {alias!r}" for name, alias in taken) or "no lock"
        raise AssertionError(f"The lock {wanted.name} of {backend!r} was not taken; taken was {others}")
