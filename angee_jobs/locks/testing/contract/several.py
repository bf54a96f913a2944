"""A lock on several keys: all or none, in one order, and each of them with all that is promised for one."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from django.db import transaction

from ...api import attach_lock, lock, locked, task_lock
from ...clock import now
from ...errors import LockLostError, LockNotAcquiredError
from ...keys import LockKey
from ...lock import Lock
from ...operations import force_release
from . import tasks
from .base import KEPT, LONG, NOISE, ContractCase, eventually
from .shared import Inside
from .transactions import TransactionCase


class SeveralCase(ContractCase):
    def prepare(self) -> None:
        self.keys = sorted((self.new_key() for _ in range(3)), key=lambda key: key.name)

    def all(self, *keys: LockKey, ttl: float = LONG, **options: Any) -> Lock:
        return lock(list(keys or self.keys), ttl=ttl, backend=self.alias, **options)

    def assert_all_free(self) -> None:
        for key in self.keys:
            self.assert_free(key)


class Several(SeveralCase):
    def test_all_are_held_and_come_free_again(self) -> None:
        with self.all() as held:
            self.assertTrue(held.held)
            held.check()
            for key in self.keys:
                self.assertFalse(self.is_free(key))
            self.assertEqual(list(held.fencing_tokens), [key.name for key in self.keys])
            self.assertTrue(held.extend())
        self.assertFalse(held.held)
        self.assertFalse(held.lost)
        for key in self.keys:
            self.assertTrue(self.is_free(key))

    def test_of_what_cannot_be_had_whole_nothing_is_kept(self) -> None:
        for number, taken in enumerate(self.keys):
            with self.subTest(number=number), self.lock(taken):
                with self.assertRaises(LockNotAcquiredError) as caught, self.all():
                    self.fail("let in without one of the keys")
                self.assertEqual(caught.exception.name, taken.name)
                self.assertFalse(self.all().acquire())
                self.assertFalse(self.all().acquire(timeout=0.2))
                with task_lock(self.keys, backend=self.alias) as acquired:
                    self.assertFalse(acquired)
                for key in self.keys:
                    self.assertEqual(self.is_free(key), key != taken)

    def test_a_key_that_is_named_twice_is_one(self) -> None:
        key = self.keys[0]
        with self.all(key, key) as held:
            self.assertEqual(list(held.fencing_tokens), [key.name])
        with self.assertRaises(ValueError):
            lock([], backend=self.alias)

    def test_one_deadline_is_for_all(self) -> None:
        with self.lock(self.keys[0]), self.lock(self.keys[2]):
            started = now()
            self.assertFalse(self.all().acquire(timeout=1))
            self.assertGreaterEqual(now() - started, 1)
            self.assertLess(now() - started, 1 + NOISE)

    def test_whatever_order_is_given_nobody_waits_for_ever(self) -> None:
        inside = Inside()

        def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(6):
                mine = dice.sample(self.keys, 2)
                with self.all(*mine, timeout=30):
                    if self.keys[0] in mine and self.keys[1] in mine:
                        with inside:
                            time.sleep(0.002)

        for thread in [self.in_background(work, seed) for seed in range(6)]:
            thread.result(50)
        self.assertLessEqual(inside.most, 1)
        for key in self.keys:
            self.assertTrue(self.is_free(key))

    def test_the_first_loss_counts(self) -> None:
        self.needs("listing")
        for lost in self.keys:
            with self.subTest(lost=lost.name):
                with self.assertRaises(LockLostError), self.all() as held:
                    force_release(lost, backend=self.alias)
                    eventually(lambda held=held: held.lost)  # type: ignore[misc]
                    self.assertFalse(held.held)
                    self.assertFalse(held.extend())
                    with self.assertRaises(LockLostError):
                        held.check()
                self.assert_all_free()

    def test_a_loss_cancels_the_task_once(self) -> None:
        self.needs("listing")

        async def main() -> None:
            with self.assertRaises(LockLostError):
                async with self.all(cancel_on_loss=True):
                    for key in self.keys[1:]:
                        force_release(key, backend=self.alias)
                    await asyncio.sleep(30)
            await asyncio.sleep(0)
            task = asyncio.current_task()
            assert task is not None
            self.assertEqual(task.cancelling(), 0)

        asyncio.run(main())
        self.assert_all_free()

    def test_every_lease_is_renewed(self) -> None:
        self.needs("leases", "listing")
        with self.all(ttl=KEPT) as held:
            time.sleep(KEPT * 1.5)
            self.assertTrue(held.held)
            for key in self.keys:
                self.assertTrue(self.backend.is_held(key))
        self.assert_all_free()

    def test_by_every_form(self) -> None:
        @locked(lambda: self.keys, backend=self.alias, on_refused="skip")
        def decorated() -> bool:
            return decorated() is None

        @locked(self.keys, backend=self.alias)
        async def coroutine() -> bool:
            async with task_lock(self.keys[:1], backend=self.alias) as acquired:
                return not acquired

        self.assertIs(decorated(), True)
        self.assertIs(asyncio.run(coroutine()), True)
        held = self.all()
        self.assertTrue(held.acquire())
        self.assertFalse(held.acquire())
        self.assertTrue(held.release())
        self.assertFalse(held.release())
        self.assertIs(self.in_background(held.acquire).result(), True)
        self.assertTrue(held.release())

    def test_places_and_shared_holds_of_several_keys(self) -> None:
        self.needs("places")
        with self.all(shared=True) as held, self.all(*self.keys[:2], slots=2), self.all(shared=True):
            self.assertTrue(held.extend())
            for key in self.keys:
                self.assertFalse(self.lock(key).acquire())
        with self.all(slots=1), self.assertRaises(LockNotAcquiredError), self.all(*self.keys[1:], slots=1):
            self.fail("two in one place")
        self.assert_all_free()

    def test_detached_together_and_attached_together(self) -> None:
        self.needs("leases")
        held = self.all()
        held.acquire()
        tokens, owner = held.fencing_tokens, held.detach()
        with attach_lock(list(reversed(self.keys)), owner, backend=self.alias) as attached:
            self.assertEqual(attached.fencing_tokens, tokens)
            self.assertTrue(attached.extend())
        self.assert_all_free()
        with self.assertRaises(LockLostError):
            attach_lock(self.keys, owner, backend=self.alias)

    def test_attached_holds_are_those_of_their_block_and_of_no_acquire(self) -> None:
        self.needs("leases")
        held = self.all()
        held.acquire()
        attached = attach_lock(self.keys, held.detach(), backend=self.alias, auto_extend=False)
        self.assertFalse(attached.acquire(), "they are held already")
        self.assertTrue(attached.held)
        with attached as entered:
            gc.collect()
            self.assertTrue(entered.extend())
        self.assert_all_free()

    def test_a_cancelled_wait_leaves_nothing(self) -> None:
        async def main() -> None:
            async with self.lock(self.keys[2]):
                waits = asyncio.create_task(self.all().aacquire(timeout=30))
                await asyncio.sleep(0.3)
                waits.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await waits

        asyncio.run(main())
        for key in self.keys:
            self.becomes_free(key)

    def test_exceptions_at_random_instants_leave_nothing(self) -> None:
        self.needs("processes")
        peer = self.new_peer()
        seen = peer.call(tasks.storm, self.keys[:2], 100, ttl=LONG, backend=self.alias, within=50)
        self.assertEqual(seen["unexpected"], [], seen)
        for key in self.keys:
            self.becomes_free(key, within=8)

    def test_one_object_excludes_its_users(self) -> None:
        shared, inside = self.all(timeout=20), Inside()
        stop = threading.Event()
        self.addCleanup(stop.set)

        def work() -> None:
            for _ in range(5):
                with shared as held, inside:
                    tokens = held.fencing_tokens
                    time.sleep(0.001)
                    self.assertEqual(held.fencing_tokens, tokens)

        for thread in [self.in_background(work) for _ in range(5)]:
            thread.result()
        self.assertEqual((inside.entered, inside.most), (25, 1))


class SeveralInTransactions(TransactionCase, SeveralCase):
    requires: ClassVar[Sequence[str]] = ()

    def prepare(self) -> None:
        TransactionCase.prepare(self)
        SeveralCase.prepare(self)

    def test_all_are_kept_until_the_commit(self) -> None:
        def test(using: str) -> None:
            with transaction.atomic(using):
                with self.all() as held:
                    tokens = held.fencing_tokens
                for key in self.keys:
                    self.assertFalse(self.elsewhere(key), "a lock was freed before the commit")
                with self.all() as held:
                    self.assertEqual(held.fencing_tokens, tokens, "they are taken again by their transaction")
                self.sql(using, "SELECT 1")
            for key in self.keys:
                self.assertTrue(self.elsewhere(key))

        self.each_database(test)

    def test_a_refusal_in_a_transaction_gives_back_at_once_what_was_taken_for_it(self) -> None:
        self.needs("verbs")

        def test(using: str) -> None:
            taken = self.lock(self.keys[2])
            self.assertTrue(taken.acquire())
            with transaction.atomic(using):
                with self.lock(self.keys[0]):
                    pass
                with self.assertRaises(LockNotAcquiredError), self.all():
                    self.fail("let in without one of the keys")
                self.assertTrue(self.elsewhere(self.keys[1]), "what was taken in vain is kept")
                self.assertFalse(self.elsewhere(self.keys[0]), "what the transaction had is given back")
            self.assertTrue(taken.release())

        self.each_database(test)

    def test_all_are_guarded(self) -> None:
        self.needs("fencing", "listing")

        def test(using: str) -> None:
            with self.all() as held:
                with transaction.atomic(using), held.guard(using):
                    self.write(using)
                self.assertEqual(self.written(using), [1])
            with self.assertRaises(LockLostError), self.all() as held, transaction.atomic(using), held.guard(using):
                self.write(using, 2)
                force_release(self.keys[1], backend=self.alias)
                eventually(lambda: held.lost)
            self.assertEqual(self.written(using), [1], "committed by a holder that had lost one of its locks")
            with self.assertRaises(LockLostError), transaction.atomic(using), self.all().guard(using):
                self.fail("guarded without a hold")
            with self.assertRaises(transaction.TransactionManagementError), self.all() as held, held.guard(using):
                self.fail("guarded without a transaction")

        self.each_database(test)
