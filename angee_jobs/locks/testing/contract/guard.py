"""Promise 7, second half: no guarded transaction of a stale holder commits after one of a newer holder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from django.db import DatabaseError, connections, transaction

from ...clock import now
from ...errors import LockBackendError, LockLostError
from ...lock import Lock
from .base import NOISE, SHORT, eventually
from .transactions import TransactionCase


class Guard(TransactionCase):
    requires: ClassVar[Sequence[str]] = ("fencing",)

    def stale_and_newer(self) -> tuple[Lock, Lock]:
        """A holder that does not know of its loss yet, and the next holder."""
        self.needs("delete_hold", "leases")
        stale, newer = self.lock(), self.lock()
        for holder in (stale, newer):
            self.addCleanup(holder.release)
        self.assertTrue(stale.acquire())
        self.strategy.delete_hold(self.key)
        self.assertTrue(newer.acquire())
        self.assertTrue(stale.held, "it has learned of the loss, which this test is not about")
        return stale, newer

    def guarded(self, holder: Lock, using: str, n: int, **options: Any) -> None:
        with transaction.atomic(using), holder.guard(using=using, **options):
            self.write(using, n)

    def give_up(self, *holders: Lock) -> None:
        for holder in holders:
            holder.release()

    def test_a_guarded_transaction_commits(self) -> None:
        def test(using: str) -> None:
            with self.lock() as held:
                for n in range(3):
                    self.guarded(held, using, n)
            with self.lock() as held:
                self.guarded(held, using, 3)
            self.assertEqual(self.written(using), [0, 1, 2, 3])

        self.each_database(test)

    def test_a_stale_holder_that_stopped_before_its_guard(self) -> None:
        def test(using: str) -> None:
            stale, newer = self.stale_and_newer()
            with transaction.atomic(using):
                self.sql(using, "SELECT 1")
            self.guarded(newer, using, 2)
            with self.assertRaises(LockLostError):
                self.guarded(stale, using, 1)
            self.guarded(newer, using, 3)
            self.assertEqual(self.written(using), [2, 3])
            self.give_up(stale, newer)

        self.each_database(test)

    def test_a_stale_holder_that_had_begun_its_transaction_before(self) -> None:
        def test(using: str) -> None:
            stale, newer = self.stale_and_newer()
            begun, passed = threading.Event(), threading.Event()
            self.addCleanup(passed.set)
            sqlite = connections[using].vendor == "sqlite"

            def late() -> None:
                with transaction.atomic(using):
                    # It has begun, and seen what was there. (On SQLite that alone would keep all others from writing.)
                    self.sql(using, "SELECT 1" if sqlite else f"SELECT n FROM {self.table}")
                    begun.set()
                    passed.wait(10)
                    with stale.guard(using=using):
                        self.write(using, 1)

            thread = self.in_background(late)
            self.assertTrue(begun.wait(10))
            self.guarded(newer, using, 2)
            passed.set()
            with self.assertRaises((LockLostError, LockBackendError, DatabaseError)):
                thread.result()
            self.assertEqual(self.written(using), [2])
            self.give_up(stale, newer)

        self.each_database(test)

    def test_a_stale_holder_that_stopped_inside_its_guard_makes_the_newer_one_wait(self) -> None:
        def test(using: str) -> None:
            stale, newer = self.stale_and_newer()
            inside, go_on = threading.Event(), threading.Event()
            self.addCleanup(go_on.set)

            def late() -> None:
                with transaction.atomic(using), stale.guard(using=using):
                    self.write(using, 1)
                    inside.set()
                    go_on.wait(20)

            def later() -> None:
                self.guarded(newer, using, 2)

            thread = self.in_background(late)
            self.assertTrue(inside.wait(10))
            started = now()
            with self.assertRaises(LockBackendError) as caught:
                self.guarded(newer, using, 2, timeout=0.5)
            self.assertGreater(now() - started, 0.4)
            self.assertLess(now() - started, 0.5 + NOISE)
            self.assertIn(self.key.name, str(caught.exception))
            waiting = self.in_background(later)
            waiting.join(0.3)
            self.assertTrue(waiting.is_alive(), "it did not wait for the older transaction")
            go_on.set()
            thread.result()  # it was there first, and may commit
            waiting.result()
            with self.assertRaises(LockLostError):
                self.guarded(stale, using, 3)
            self.assertEqual(self.written(using), [1, 2])
            self.give_up(stale, newer)

        self.each_database(test)

    def test_a_stale_holder_that_stopped_after_its_guard(self) -> None:
        def test(using: str) -> None:
            stale, newer = self.stale_and_newer()
            self.guarded(stale, using, 1)
            self.guarded(newer, using, 2)
            self.assertEqual(self.written(using), [1, 2])
            self.give_up(stale, newer)

        self.each_database(test)

    def test_a_transaction_whose_guard_refused_cannot_commit(self) -> None:
        def test(using: str) -> None:
            stale, newer = self.stale_and_newer()
            self.guarded(newer, using, 2)
            try:
                with transaction.atomic(using):
                    self.write(using, 1)
                    try:
                        with stale.guard(using=using):
                            self.fail("the guard let a stale holder in")
                    except LockLostError:
                        pass  # somebody swallows it
            except DatabaseError:
                pass
            self.assertEqual(self.written(using), [2])
            self.give_up(stale, newer)

        self.each_database(test)

    def test_a_loss_inside_the_guard_rolls_back(self) -> None:
        self.needs("leases")

        def test(using: str) -> None:
            held = self.lock(ttl=SHORT)
            held.acquire()
            try:
                with transaction.atomic(using):
                    try:
                        with held.guard(using=using):
                            self.write(using, 1)
                            eventually(lambda: held.lost)
                    except LockLostError:
                        pass
                    else:
                        self.fail("the loss inside the guard was not told")
            except DatabaseError:
                pass
            self.assertEqual(self.written(using), [])
            eventually(lambda: not self.backend.is_held(self.key))

        self.each_database(test)

    def test_the_guard_refuses_after_a_loss_and_without_a_hold(self) -> None:
        self.needs("leases")
        using = self.strategy.databases[0]
        held = self.lock(ttl=SHORT)
        with self.assertRaises(LockLostError), transaction.atomic(using), held.guard(using=using):
            self.fail("the guard let somebody in without a hold")
        held.acquire()
        eventually(lambda: held.lost)
        with self.assertRaises(LockLostError), transaction.atomic(using), held.guard(using=using):
            self.fail("the guard let a stale holder in")

    def test_the_exception_of_the_body_passes_through(self) -> None:
        def test(using: str) -> None:
            with self.lock() as held:
                with self.assertRaises(ZeroDivisionError), transaction.atomic(using), held.guard(using=using):
                    self.write(using)
                    raise ZeroDivisionError
                self.assertEqual(self.written(using), [])
                self.guarded(held, using, 2)
            self.assertEqual(self.written(using), [2])

        self.each_database(test)

    def test_guards_of_different_keys_are_independent(self) -> None:
        def test(using: str) -> None:
            other = self.lock(self.new_key())
            other.acquire()
            with self.lock() as held:
                self.guarded(held, using, 1)
                self.guarded(other, using, 2)
                self.guarded(held, using, 3)
            other.release()
            self.assertEqual(self.written(using), [1, 2, 3])

        self.each_database(test)

    def test_s29_the_settings_of_the_connection_are_what_they_were(self) -> None:
        settings = {
            "postgresql": ("SHOW lock_timeout", "SHOW statement_timeout", "SHOW transaction_isolation"),
            "sqlite": ("PRAGMA busy_timeout",),
        }

        def test(using: str) -> None:
            reads = settings.get(connections[using].vendor, ())
            if connections[using].vendor == "postgresql":
                self.sql(using, "SET lock_timeout = '77s'")
            before = [self.sql(using, read) for read in reads]
            with self.lock() as held, transaction.atomic(using):
                with held.guard(using=using, timeout=3):
                    self.assertEqual([self.sql(using, read) for read in reads], before)
                self.assertEqual([self.sql(using, read) for read in reads], before)
            self.assertEqual([self.sql(using, read) for read in reads], before)
            stale, newer = self.stale_and_newer()
            self.guarded(newer, using, 1)
            with self.assertRaises(LockLostError):
                self.guarded(stale, using, 2)
            self.assertEqual([self.sql(using, read) for read in reads], before)
            self.give_up(stale, newer)
            connections[using].close()

        self.each_database(test)
