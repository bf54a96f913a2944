"""Promise 10: a refusal and a fault are never confused, and no text has the owner id."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ...api import task_lock
from ...backends.base import BaseLockBackend
from ...clock import now
from ...errors import LockBackendError, LockError, LockLostError, LockNotAcquiredError
from ...keys import LockKey
from .base import NOISE, SHORT, ContractCase, eventually

#: What one request may take in these tests, in seconds, instead of the usual OPERATION_SECONDS.
PATIENCE = 1.0


class Broken(ContractCase):
    """A storage that cannot be reached, or does not answer (scenario 48)."""

    def prepare(self) -> None:
        with self.lock(self.new_key()):
            pass  # connected, and seen to work

    @contextlib.contextmanager
    def impatient(self, trouble: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """Shorten deadlines while the storage is in trouble; else it has the usual time, for machines that are busy."""
        with trouble, contextlib.ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith("angee_jobs.locks.") and hasattr(module, "OPERATION_SECONDS"):
                    stack.enter_context(mock.patch.object(module, "OPERATION_SECONDS", PATIENCE))
            yield

    def test_a_storage_that_cannot_be_reached_is_an_error_and_no_refusal(self) -> None:
        self.needs("unreachable")
        free = self.new_key()
        with self.lock(ttl=10) as held:
            with self.impatient(self.strategy.unreachable()):
                for key in (free, self.key):
                    for timeout in (None, 0, 0.6):
                        started = now()
                        with self.assertRaises(LockBackendError) as caught:
                            self.lock(key).acquire(timeout)
                        self.assertLess(now() - started, PATIENCE + NOISE)
                        self.assertIsNotNone(caught.exception.__cause__, "the driver's error is the cause")
                    with self.assertRaises(LockBackendError), self.lock(key):
                        self.fail("failed open")
                    with self.assertRaises(LockBackendError), task_lock(key, backend=self.alias):
                        self.fail("failed open, or a backend error looks like a refusal")
                self.assertTrue(held.held, "an error of another lock cost the hold")
            eventually(lambda: self.is_free(free), what="it works again")
            self.assert_held()
        self.assert_free()
        self.becomes_free(free)

    def test_leaving_a_block_while_the_storage_cannot_be_reached(self) -> None:
        self.needs("unreachable")
        self._leave_a_block_inside(self.strategy.unreachable())

    def test_s48_leaving_a_block_while_the_storage_hangs(self) -> None:
        self.needs("hanging")
        self._leave_a_block_inside(self.strategy.hanging())

    def _leave_a_block_inside(self, trouble: Any) -> None:
        clean, failed = self.lock(self.key, ttl=10), self.lock(self.new_key(), ttl=10)
        clean.__enter__()
        failed.__enter__()
        error = ZeroDivisionError("of the body")
        with self.impatient(trouble):
            started = now()
            leaving = self.in_background(failed.__exit__, ZeroDivisionError, error, None)
            with self.assertRaises(LockBackendError):
                self.in_background(clean.__exit__, None, None, None).result(15)
            leaving.result(15)  # raises nothing itself
            self.assertLess(now() - started, PATIENCE + NOISE)
            self.assertFalse(clean.held)
        self.assertTrue(any(failed.name in note for note in error.__notes__), "the body's error carries a note")
        self.becomes_free(clean.key, within=8)  # before the lease would end
        self.becomes_free(failed.key, within=8)

    def test_s48_waits_end_on_time_with_an_error(self) -> None:
        self.needs("hanging")
        held = self.lock()
        held.acquire()
        free = self.new_key()

        def wait(key: LockKey) -> float:
            started = now()
            with self.assertRaises(LockBackendError):
                self.lock(key).acquire(timeout=0.6)
            return now() - started

        with self.impatient(self.strategy.hanging()):
            waited = [thread.result() for thread in [self.in_background(wait, free) for _ in range(3)]]
        self.assertLess(max(waited), 0.6 + NOISE)
        self.assertGreater(max(waited), 0.4)
        self.assertTrue(held.held)
        held.release()
        self.becomes_free()
        self.becomes_free(free)

    def test_s48_a_hold_survives_a_hang_that_is_shorter_than_its_lease(self) -> None:
        self.needs("hanging", "leases")
        with self.lock(ttl=3) as held:
            with self.impatient(self.strategy.hanging()):
                time.sleep(1.2)  # a renewal was due after 1.0
            self.is_renewed(held)
            self.assertTrue(held.held)
            self.assert_held()
        self.assert_free()

    def test_an_error_is_never_a_refusal_whichever_verb_fails(self) -> None:
        self.needs("verbs")
        error = LockBackendError("away")
        for operation in ("acquire", "remaining"):
            with (
                self.subTest(operation),
                self.lock(),
                mock.patch.object(self.backend, operation, side_effect=error),
                self.assertRaises(LockBackendError),
            ):
                self.lock().acquire(timeout=0.5)
        with mock.patch.object(self.backend, "inspect", side_effect=error), self.assertRaises(LockBackendError):
            self.backend.is_held(self.key)
        self.assert_free()


class Secrecy(ContractCase):
    """The owner id is in no message, log line or representation."""

    def test_the_owner_id_is_nowhere(self) -> None:
        said: list[str] = []

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(self.format(record))

        listener = Listener(logging.DEBUG)
        listener.setFormatter(logging.Formatter("%(message)s %(args)s"))
        logger = logging.getLogger("angee_jobs")
        level = logger.level
        logger.addHandler(listener)
        logger.setLevel(logging.DEBUG)
        owners: list[str] = []
        try:
            with self.hear("lock_acquired", "lock_refused", "lock_released", "lock_lost") as heard:
                self._have_everything_happen(owners, said)
            said.extend(repr(arguments) for _, arguments in heard)
        finally:
            logger.removeHandler(listener)
            logger.setLevel(level)
        self.assertTrue(owners)
        for owner in owners:
            self.assertGreaterEqual(len(owner), 16)
            for text in said:
                self.assertNotIn(owner, text)

    def _have_everything_happen(self, owners: list[str], said: list[str]) -> None:
        def note(*things: object) -> None:
            for thing in things:
                said.extend([str(thing), repr(thing)])
                if isinstance(thing, BaseException):
                    said.extend([repr(thing.args), repr(vars(thing)), *getattr(thing, "__notes__", ())])

        with self.lock() as held:
            assert held.owner_id is not None
            owners.append(held.owner_id)
            note(held, held.key, self.backend)
            if "listing" not in self.strategy.lacks:
                found = [record for record in self.backend.list_held(now() + 5) if record.name == self.key.name]
                self.assertEqual(len(found), 1)
                note(*found, self.backend.info(found[0]))
                self.assertEqual(self.backend.info(found[0]).owner_id, "***")
            for use in (self.lock(), self.lock(timeout=1.5)):
                with self.assertRaises(LockNotAcquiredError) as caught, use:
                    pass
                note(caught.exception, caught.exception.holder, use)
            with (
                mock.patch.object(self.backend, "release", side_effect=LockBackendError("away", name=self.key.name)),
                self.assertRaises(LockBackendError) as broken,
            ):
                held.release()
            note(broken.exception, held)
        self.becomes_free()
        if "leases" in self.strategy.lacks:
            return
        with self.assertRaises(LockLostError) as lost, self.lock(ttl=SHORT, auto_extend=False) as held:
            assert held.owner_id is not None
            owners.append(held.owner_id)
            eventually(lambda: held.lost)
            note(held)
        note(lost.exception)

    def test_errors_have_one_base_and_name_the_lock(self) -> None:
        for error in (LockNotAcquiredError, LockLostError, LockBackendError):
            self.assertTrue(issubclass(error, LockError))
        with self.lock():
            with self.assertRaises(LockNotAcquiredError) as caught, self.patient_look(), self.lock():
                pass
            self.assertEqual(caught.exception.name, self.key.name)
            self.assertIn(self.key.name, str(caught.exception))
            if "listing" not in self.strategy.lacks and type(self.backend).inspect is not BaseLockBackend.inspect:
                holder = caught.exception.holder
                assert holder is not None
                self.assertEqual(holder.owner_id, "***")
