"""Promise 1 further: one ``Lock`` object, used by many threads and tasks at once, as one uses a ``threading.Lock``."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from ...api import task_lock
from ...errors import LockLostError, LockNotAcquiredError
from ...lock import Lock
from .base import LONG, ContractCase

#: How many threads or tasks use the object, and how often each tries.
USERS, TRIES = 8, 25


class Inside:
    """Counts who is inside, as a file or a row would be worked on."""

    def __init__(self) -> None:
        self.entered = self.now = self.most = 0

    def __enter__(self) -> None:
        self.entered += 1
        self.now += 1
        self.most = max(self.most, self.now)

    def __exit__(self, *exc: object) -> None:
        self.now -= 1


class SharedObject(ContractCase):
    def test_one_object_excludes_the_threads_that_use_it(self) -> None:
        shared, waiting, asked = self.lock(), self.lock(timeout=20), task_lock(self.key, ttl=LONG, backend=self.alias)
        inside, tokens = Inside(), []
        dice = random.Random(4)

        def work(held: Lock) -> None:
            with inside:
                self.assertTrue(held.held)
                token = held.fencing_token
                time.sleep(0.001)
                self.assertEqual(held.fencing_token, token, "another thread's hold is told as this one's")
                tokens.append(token)

        def by_block() -> None:
            with shared as held:
                work(held)

        def by_waiting_block() -> None:
            with waiting as held:
                work(held)

        def by_acquire() -> None:
            if not shared.acquire():
                raise LockNotAcquiredError("refused")
            try:
                work(shared)
            finally:
                self.assertTrue(shared.release())

        def by_task_lock() -> None:
            with asked as acquired:
                if not acquired:
                    raise LockNotAcquiredError("refused")
                with inside:
                    time.sleep(0.001)

        def use(ways: list[Callable[[], None]]) -> None:
            for way in ways:
                try:
                    way()
                except LockNotAcquiredError:
                    time.sleep(0.0005)

        every = (by_block, by_block, by_acquire, by_task_lock, by_waiting_block)
        threads = [self.in_background(use, dice.choices(every, k=TRIES)) for _ in range(USERS)]
        for thread in threads:
            thread.result(50)
        self.assertEqual(inside.most, 1, f"{inside.entered} entries")
        self.assertGreater(inside.entered, TRIES / 2)
        known = [token for token in tokens if token is not None]
        self.assertEqual(len(known), len(set(known)), "one hold was told to two callers")
        self.assert_free()

    def test_one_object_excludes_the_tasks_that_use_it(self) -> None:
        shared, waiting, asked = self.lock(), self.lock(timeout=20), task_lock(self.key, ttl=LONG, backend=self.alias)
        inside = Inside()
        dice = random.Random(5)

        async def work(held: Lock) -> None:
            with inside:
                self.assertTrue(held.held)
                await asyncio.sleep(0.001)

        async def by_block() -> None:
            async with shared as held:
                await work(held)

        async def by_waiting_block() -> None:
            async with waiting as held:
                await work(held)

        async def by_acquire() -> None:
            if not await shared.aacquire():
                raise LockNotAcquiredError("refused")
            try:
                await work(shared)
            finally:
                self.assertTrue(await shared.arelease())

        async def by_task_lock() -> None:
            async with asked as acquired:
                if not acquired:
                    raise LockNotAcquiredError("refused")
                with inside:
                    await asyncio.sleep(0.001)

        async def use(ways: list[Callable[[], Any]]) -> None:
            for way in ways:
                try:
                    await way()
                except LockNotAcquiredError:
                    await asyncio.sleep(0.0005)

        async def main() -> None:
            every = (by_block, by_block, by_acquire, by_task_lock, by_waiting_block)
            async with asyncio.timeout(50), asyncio.TaskGroup() as group:
                for _ in range(USERS):
                    group.create_task(use(dice.choices(every, k=TRIES)))

        asyncio.run(main())
        self.assertEqual(inside.most, 1, f"{inside.entered} entries")
        self.assertGreater(inside.entered, TRIES / 2)
        self.assert_free()

    def test_what_a_block_yields_speaks_for_its_own_hold(self) -> None:
        """Seen: one thread's hold is lost, another gets the lock, and the first one's check() passed."""
        self.needs("verbs", "listing")
        shared = self.lock()
        lost, taken, done = threading.Event(), threading.Event(), threading.Event()
        firsts: list[Lock] = []

        def first() -> None:
            with self.assertRaises(LockLostError), shared as held:
                firsts.append(held)
                token = held.fencing_token
                lost.set()
                self.assertTrue(taken.wait(20))
                for mine in (held, shared):
                    self.assertFalse(mine.held)
                    self.assertTrue(mine.lost)
                    self.assertEqual(mine.fencing_token, token)
                    self.assertFalse(mine.release())
                    with self.assertRaises(LockLostError):
                        mine.check()
                done.set()

        thread = self.in_background(first)
        self.assertTrue(lost.wait(20))
        self._lose()
        with shared as held:
            taken.set()
            self.assertTrue(done.wait(20))
            for mine in (held, shared):
                self.assertTrue(mine.held)
                self.assertFalse(mine.lost)
                mine.check()
            self.assert_held()
            # A helper thread of a body asks what it was given.
            for mine, holds in ((firsts[0], False), (held, True)):
                self.assertIs(self.in_background(lambda mine=mine: mine.held).result(), holds)
            thread.result()
            held.check()
            self.assert_held()
        self.assert_free()

    def test_what_a_caller_acquired_is_its_own(self) -> None:
        self.needs("verbs", "listing")
        shared = self.lock()
        held, taken = threading.Event(), threading.Event()

        def first() -> tuple[bool, bool, bool]:
            self.assertTrue(shared.acquire())
            held.set()
            self.assertTrue(taken.wait(20))
            return shared.held, shared.lost, shared.release()

        thread = self.in_background(first)
        self.assertTrue(held.wait(20))
        self._lose()
        self.assertTrue(shared.acquire())
        taken.set()
        self.assertEqual(thread.result(), (False, True, False))
        self.assertTrue(shared.held)
        self.assertTrue(shared.release())
        self.assert_free()

    def test_a_refused_caller_ends_no_hold_of_the_object(self) -> None:
        shared = self.lock()
        with shared as held:
            for _ in range(5):
                self.assertIs(self.in_background(shared.acquire).result(), False)
                with self.assertRaises(LockNotAcquiredError), shared:
                    self.fail("two holders")
            self.assertTrue(held.held)
            self.assert_held()
        self.assert_free()

    def _lose(self) -> None:
        """Let the present hold of the key be lost."""
        from ..doubles import lose

        lose(self.key, backend=self.alias)
