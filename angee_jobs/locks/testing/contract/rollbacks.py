"""Promise 9 when something goes wrong: rollbacks, database errors, refusals, a loss before the commit."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from django.db import DatabaseError, connections, transaction

from ...api import task_lock
from ...errors import LockNotAcquiredError
from .base import KEPT, NOISE, eventually
from .transactions import TransactionCase


class Rollbacks(TransactionCase):
    def test_a_rollback_frees_the_lock(self) -> None:
        def test(using: str) -> None:
            with self.assertRaises(ZeroDivisionError), transaction.atomic(using):
                with self.lock():
                    self.write(using)
                raise ZeroDivisionError
            self.becomes_free()
            self.assertEqual(self.written(using), [])
            with transaction.atomic(using):
                with self.lock():
                    self.write(using)
                transaction.set_rollback(True, using)
                self.assertFalse(self.elsewhere(), "freed before the rollback")
            self.becomes_free()
            self.assertEqual(self.written(using), [])

        self.each_database(test)

    def test_a_rollback_frees_the_lock_though_somebody_keeps_the_exception(self) -> None:
        def test(using: str) -> None:
            kept: list[BaseException] = []
            try:
                with transaction.atomic(using), self.lock():
                    raise ZeroDivisionError
            except ZeroDivisionError as error:
                kept.append(error)
            self.becomes_free(within=NOISE)  # at the next try, if not before
            try:
                with transaction.atomic(using):
                    with self.lock():
                        pass
                    raise ZeroDivisionError
            except ZeroDivisionError as error:
                kept.append(error)
            eventually(lambda: not self.backend.is_held(self.key), what="it is freed though nobody tries")

        self.each_database(test)

    def test_a_rollback_frees_the_lock_though_somebody_keeps_what_was_registered_for_the_commit(self) -> None:
        def test(using: str) -> None:
            kept: list[Any] = []
            for wait in (False, True):
                with self.assertRaises(ZeroDivisionError), transaction.atomic(using):
                    with self.lock():
                        self.write(using)
                    kept.extend(connections[using].run_on_commit)
                    raise ZeroDivisionError
                if wait:
                    eventually(lambda: not self.backend.is_held(self.key), what="it is freed though nobody tries")
                else:
                    self.assertTrue(self.elsewhere(), "it is freed before anybody is refused")

        self.each_database(test)

    def test_a_try_right_after_a_rollback_is_not_refused_by_the_release_that_is_under_way(self) -> None:
        self.needs("verbs")
        real = self.backend.release

        def slow(*args: Any) -> bool:
            time.sleep(0.4)
            return real(*args)

        def test(using: str) -> None:
            with mock.patch.object(self.backend, "release", slow):
                with self.assertRaises(ZeroDivisionError), transaction.atomic(using):
                    with self.lock():
                        self.write(using)
                    raise ZeroDivisionError
                time.sleep(0.1)  # somebody is giving the lock up now
                with task_lock(self.key, backend=self.alias) as acquired:
                    self.assertIs(acquired, True)

        self.each_database(test)

    def test_the_rollback_of_a_savepoint_leaves_nothing_behind(self) -> None:
        def test(using: str) -> None:
            with transaction.atomic(using):
                self.write(using, 1)
                with self.assertRaises(ZeroDivisionError), transaction.atomic(using):
                    with self.lock():
                        self.write(using, 2)
                    raise ZeroDivisionError
                self.write(using, 3)
                with transaction.atomic(using), self.lock(timeout=5):
                    self.write(using, 4)
                self.assertFalse(self.elsewhere(), "the inner atomic is not the end of the transaction")
            self.assertEqual(self.written(using), [1, 3, 4])

        self.each_database(test)

    def test_s23_a_refused_try_leaves_the_transaction_usable(self) -> None:
        def test(using: str) -> None:
            held = self.lock()
            held.acquire()
            with transaction.atomic(using):
                self.write(using, 1)
                with self.assertRaises(LockNotAcquiredError), self.lock():
                    self.fail("two holders")
                with task_lock(self.key, backend=self.alias, timeout=1.5) as acquired:
                    self.assertIs(acquired, False)
                self.assertIs(self.lock().acquire(), False)
                self.write(using, 2)
            self.assertEqual(self.written(using), [1, 2])
            held.release()

        self.each_database(test)

    def test_s24_a_database_error_in_the_body(self) -> None:
        def test(using: str) -> None:
            with self.assertRaises(DatabaseError) as caught, transaction.atomic(using), self.lock():
                self.sql(using, "SELECT * FROM no_such_table_anywhere")
            self.assertIn("no_such_table_anywhere", str(caught.exception))
            self.becomes_free(within=NOISE)
            # And with the error caught, so that the block is left in an aborted transaction.
            with transaction.atomic(using):
                with self.lock():
                    with self.assertRaises(DatabaseError):
                        self.sql(using, "SELECT * FROM no_such_table_anywhere")
                self.assertFalse(self.elsewhere(), "freed before the transaction was over")
                transaction.set_rollback(True, using)
            self.becomes_free(within=NOISE)

        self.each_database(test)

    def test_s24_an_explicit_release_in_an_aborted_transaction(self) -> None:
        def test(using: str) -> None:
            with transaction.atomic(using):
                with self.assertRaises(DatabaseError):
                    self.sql(using, "SELECT * FROM no_such_table_anywhere")
                held = self.lock()
                self.assertTrue(held.acquire())
                self.assertTrue(held.release())
                transaction.set_rollback(True, using)

        self.each_database(test)

    def test_a_loss_between_the_block_and_the_commit_is_told(self) -> None:
        self.needs("delete_hold", "leases")
        using = self.strategy.databases[0]
        with self.hear("lock_lost") as heard, transaction.atomic(using):
            with self.assertLogs("angee_jobs", "WARNING") as logged:
                with self.lock(ttl=KEPT):
                    self.write(using)
                self.strategy.delete_hold(self.key)
                eventually(lambda: heard, KEPT + NOISE, "lock_lost is sent")
                eventually(lambda: any(self.key.name in line for line in logged.output), what="it is logged")
            newer = self.lock()
            self.assertTrue(newer.acquire())
        self.assertTrue(newer.held)
        self.assertTrue(newer.release(), "the end of the transaction released the next hold")
        self.assertEqual(self.written(using), [1])
