"""Promise 9: a block that is entered in a transaction keeps its hold until the commit. The connection is untouched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from django.db import close_old_connections, connections, transaction

from ...api import lock, locked, task_lock
from ...backends.base import OPERATION_SECONDS
from ...clock import now
from ...errors import LockNotAcquiredError
from ...keys import LockKey
from . import tasks
from .base import RENEWED, SHORT, ContractCase


class TransactionCase(ContractCase):
    """A table of the test's own in each database of the strategy, for the callers' transactions."""

    table = "angee_contract"

    def prepare(self) -> None:
        for using in self.strategy.databases:
            self.sql(using, f"CREATE TABLE IF NOT EXISTS {self.table} (n integer PRIMARY KEY)")
            self.sql(using, f"DELETE FROM {self.table}")
        self.addCleanup(connections.close_all)

    def sql(self, using: str, statement: str) -> list[tuple[Any, ...]]:
        with connections[using].cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def write(self, using: str, n: int = 1) -> None:
        self.sql(using, f"INSERT INTO {self.table} VALUES ({n})")

    def written(self, using: str) -> list[int]:
        return [n for (n,) in self.sql(using, f"SELECT n FROM {self.table} ORDER BY n")]

    def elsewhere(self, key: LockKey | None = None) -> bool:
        """Whether another thread, which has no transaction, gets the lock now."""
        return bool(self.in_background(self.is_free, key).result())

    def each_database(self, test: Callable[[str], None]) -> None:
        for using in self.strategy.databases:
            with self.subTest(using=using):
                self.key = self.new_key()
                test(using)
                self.assertTrue(self.elsewhere(), "the lock was not freed")
                self.assertEqual(self.sql(using, "SELECT 1"), [(1,)])


class Transactions(TransactionCase):
    def test_the_lock_is_held_until_the_commit(self) -> None:
        def test(using: str) -> None:
            with transaction.atomic(using):
                with self.lock():
                    self.write(using)
                self.assertFalse(self.elsewhere(), "the lock was freed before the commit")
                self.write(using, 2)
                self.assertFalse(self.elsewhere(), "the lock was freed before the commit")
            self.assertTrue(self.elsewhere())
            self.assertEqual(self.written(using), [1, 2])

        self.each_database(test)

    def test_the_lock_is_held_until_the_commit_by_every_form(self) -> None:
        def test(using: str) -> None:
            @locked(self.key, backend=self.alias)
            def decorated() -> None:
                pass

            with transaction.atomic(using):
                decorated()
                self.assertFalse(self.elsewhere())
            self.assertTrue(self.elsewhere())
            with transaction.atomic(using):
                with task_lock(self.key, backend=self.alias) as acquired:
                    self.assertIs(acquired, True)
                self.assertFalse(self.elsewhere())
            self.assertTrue(self.elsewhere())

        self.each_database(test)

    def test_the_lease_is_renewed_until_the_commit(self) -> None:
        self.needs("leases")
        using = self.strategy.databases[0]
        with transaction.atomic(using):
            with self.lock(ttl=RENEWED):
                self.write(using)
            until = now() + RENEWED * 1.1
            while now() < until:
                self.assertFalse(self.elsewhere())
        self.assertTrue(self.elsewhere())

    def test_s26_closing_connections_frees_nothing(self) -> None:
        def test(using: str) -> None:
            with self.lock() as held:
                for close in (connections[using].close, close_old_connections, connections.close_all):
                    self.write(using)
                    close()
                    self.assert_held()
                    self.assertTrue(held.held)
                    self.sql(using, f"DELETE FROM {self.table}")
            self.assertTrue(self.elsewhere())

        self.each_database(test)

    def test_an_explicit_release_is_immediate(self) -> None:
        def test(using: str) -> None:
            with transaction.atomic(using):
                self.write(using)
                held = self.lock()
                held.acquire()
                self.assertTrue(held.release())
                self.assertTrue(self.elsewhere())
                with self.lock() as block:
                    self.assertTrue(block.release())
                    self.assertTrue(self.elsewhere())
                self.assertTrue(self.elsewhere())
                with self.lock() as block:
                    pass
                self.assertFalse(self.elsewhere())
                self.assertTrue(block.release(), "release() after the block, before the commit")
                self.assertTrue(self.elsewhere())

        self.each_database(test)

    def test_a_hold_without_a_block_is_no_matter_of_the_transaction(self) -> None:
        def test(using: str) -> None:
            held = self.lock()
            with transaction.atomic(using):
                held.acquire()
            self.assertFalse(self.elsewhere())
            held.release()

        self.each_database(test)

    def test_a_block_around_the_transaction_frees_at_its_own_end(self) -> None:
        def test(using: str) -> None:
            with self.lock():
                with transaction.atomic(using):
                    self.write(using)
                self.assertFalse(self.elsewhere())
            self.assertTrue(self.elsewhere())

        self.each_database(test)

    def test_manual_transactions_free_at_the_end_of_the_block_with_a_warning(self) -> None:
        def test(using: str) -> None:
            connections[using].set_autocommit(False)
            try:
                with self.assertLogs("angee_jobs", "WARNING") as logged, self.lock():
                    self.write(using)
                self.assertTrue(self.elsewhere())
                self.assertTrue(any("autocommit" in line and using in line for line in logged.output))
                connections[using].rollback()
            finally:
                connections[using].set_autocommit(True)

        self.each_database(test)

    def test_s41_two_blocks_in_one_transaction(self) -> None:
        def test(using: str) -> None:
            with transaction.atomic(using):
                with self.lock() as first:
                    token = first.fencing_token
                    self.write(using, 1)
                self.assertFalse(self.elsewhere())
                with self.lock() as second:
                    self.assertTrue(second.held)
                    self.assertEqual(second.fencing_token, token)
                    with self.assertRaises(LockNotAcquiredError), self.lock():
                        self.fail("a block inside a block is no re-entry")
                    self.write(using, 2)
                self.assertFalse(self.elsewhere())
                with transaction.atomic(using), self.lock() as third:
                    self.assertEqual(third.fencing_token, token)
                self.assertFalse(self.elsewhere())
            self.assertTrue(self.elsewhere())
            self.assertEqual(self.written(using), [1, 2])

        self.each_database(test)

    def test_s41_another_transaction_does_not_take_the_lock_again(self) -> None:
        def other(using: str) -> bool:
            with transaction.atomic(using), task_lock(self.key, backend=self.alias) as acquired:
                return acquired

        def test(using: str) -> None:
            with transaction.atomic(using):
                with self.lock():
                    pass
                self.assertIs(self.in_background(other, using).result(), False)

        self.each_database(test)

    def test_s43_a_task_that_is_enqueued_on_commit_gets_the_lock(self) -> None:
        def test(using: str) -> None:
            answers: list[bool] = []

            def run_at_once() -> None:
                with task_lock(self.key, backend=self.alias) as acquired:
                    answers.append(acquired)
                answers.append(self.elsewhere())

            with transaction.atomic(using):
                with self.lock():
                    transaction.on_commit(run_at_once, using)
                transaction.on_commit(run_at_once, using)
                self.assertEqual(answers, [])
            self.assertEqual(answers, [True] * 4)

        self.each_database(test)

    def test_the_last_of_several_transactions_frees(self) -> None:
        if len(self.strategy.databases) < 2:
            self.skipTest("the strategy has one database")
        one, two = self.strategy.databases[:2]
        outer = transaction.atomic(one)
        inner = transaction.atomic(two)
        with outer:
            with inner:
                with self.lock():
                    self.write(one)
                    self.write(two)
            self.assertFalse(self.elsewhere(), "the other transaction is not over")
        self.assertTrue(self.elsewhere())

    def test_other_processes_are_refused_until_the_commit(self) -> None:
        using = self.strategy.databases[0]
        peer = self.peer()
        with transaction.atomic(using):
            with self.lock():
                self.write(using)
            self.assertFalse(peer.call(tasks.acquire, "a", self.key, ttl=SHORT, backend=self.alias))
            peer.begin(tasks.acquire, "b", self.key, 20, ttl=5, backend=self.alias)
        self.assertTrue(peer.result())
        self.assertTrue(peer.call(tasks.release, "b"))

    def test_a_waiter_enters_after_the_commit_and_sees_what_was_written(self) -> None:
        def test(using: str) -> None:
            seen: list[list[int]] = []
            waiting = threading.Event()

            def work() -> None:
                waiting.set()
                with lock(self.key, timeout=20, backend=self.alias):
                    seen.append(self.written(using))

            with transaction.atomic(using):
                with self.lock():
                    thread = self.in_background(work)
                    self.assertTrue(waiting.wait(10))
                    self.write(using)
                thread.join(0.3)
                self.assertEqual(seen, [])
            thread.result()
            self.assertEqual(seen, [[1]])

        self.each_database(test)

    def test_the_hold_is_seen_until_the_commit(self) -> None:
        self.needs("listing")
        using = self.strategy.databases[0]
        with transaction.atomic(using):
            with self.lock():
                pass
            self.assertIsNotNone(self.backend.inspect(self.key.name, now() + OPERATION_SECONDS))
        self.assertIsNone(self.backend.inspect(self.key.name, now() + OPERATION_SECONDS))
