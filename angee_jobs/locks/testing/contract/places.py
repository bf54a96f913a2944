"""Several holders of one key: ``slots=`` and ``shared=True``. Each has all that an exclusive holder is promised."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from django.db import transaction

from ...api import attach_lock, lock, locked, task_lock
from ...backends.base import WANTED_SECONDS
from ...clock import now
from ...errors import LockLostError, LockNotAcquiredError
from ...lock import Lock
from ...operations import force_release, held_locks, lock_info, reap_expired_locks, task_lock_is_held
from . import tasks
from .base import KEPT, LONG, NOISE, SHORT, ContractCase, eventually
from .shared import Inside
from .transactions import TransactionCase


class PlacesCase(ContractCase):
    requires: ClassVar[Sequence[str]] = ("places",)

    def hold(self, **options: Any) -> Lock:
        """A hold that ends with the test."""
        held = self.lock(**options)
        self.assertTrue(held.acquire(), f"refused with {options}")
        self.addCleanup(held.release)
        return held

    def assert_refused(self, **options: Any) -> None:
        self.assertFalse(self.lock(**options).acquire(), f"let in with {options}")

    def enters(self, **options: Any) -> bool:
        """Whether a hold of this kind is granted now; it is given back."""
        held = self.lock(**options)
        return held.acquire() and held.release()


class Places(PlacesCase):
    def test_so_many_enter_and_no_more(self) -> None:
        held = [self.hold(slots=3) for _ in range(3)]
        self.assertEqual([each.slot for each in held], [0, 1, 2])
        self.assert_refused(slots=3)
        self.assert_refused()
        self.assertTrue(held[1].release())
        again = self.hold(slots=3)
        self.assertEqual(again.slot, 1)
        self.assert_refused(slots=3)
        for each in (held[0], held[2], again):
            self.assertTrue(each.release())
            self.assertFalse(each.release())
        self.assert_free()

    def test_an_exclusive_hold_excludes_all_and_all_exclude_it(self) -> None:
        alone = self.hold()
        self.assertIsNone(alone.slot)
        self.assert_refused(slots=3)
        self.assert_refused(shared=True)
        alone.release()
        for options in ({"slots": 3}, {"slots": 1}, {"shared": True}):
            with self.subTest(options=options):
                held = self.hold(**options)
                self.assert_refused()
                held.release()
                self.assert_free()

    def test_shared_holds_exclude_only_exclusive_ones(self) -> None:
        held = [self.hold(shared=True) for _ in range(5)]
        self.assertEqual([each.slot for each in held], [None] * 5)
        placed = self.hold(slots=1)
        self.assert_refused(slots=1)
        for each in held:
            self.assert_refused()
            self.assertTrue(each.release())
        self.assert_refused()
        placed.release()
        self.assert_free()

    def test_one_place_excludes_like_an_exclusive_hold(self) -> None:
        first = self.hold(slots=1)
        self.assertEqual(first.slot, 0)
        self.assert_refused(slots=1)
        self.assertEqual(self.hold(slots=2).slot, 1)

    def test_while_the_numbers_differ_the_largest_is_the_limit(self) -> None:
        wide = [self.hold(slots=4) for _ in range(3)]
        self.assert_refused(slots=2)
        last = self.hold(slots=4)
        self.assert_refused(slots=4)
        for each in (wide[2], last):
            each.release()
        self.assert_refused(slots=2)
        wide[0].release()
        self.assertEqual(self.hold(slots=2).slot, 0)
        self.assert_refused(slots=2)

    def test_tokens_rise_over_all_kinds(self) -> None:
        self.needs("fencing")
        tokens = []
        for options in ({}, {"slots": 3}, {"shared": True}, {}, {"shared": True}, {"slots": 2}, {}):
            with self.lock(**options) as held:
                tokens.append(held.fencing_token)
        together = [self.hold(slots=3), self.hold(shared=True), self.hold(slots=3)]
        tokens += [each.fencing_token for each in together]
        self.assertEqual(tokens, sorted(set(tokens)))

    def test_what_cannot_be_is_refused_at_once(self) -> None:
        for slots, error in (
            (0, ValueError),
            (-1, ValueError),
            (True, ValueError),
            (10**6, ValueError),
            ("3", TypeError),
        ):
            with self.subTest(slots=slots), self.assertRaises(error):
                self.lock(slots=slots)
        with self.assertRaises(ValueError):
            self.lock(slots=2, shared=True)

    def test_every_form_takes_them(self) -> None:
        @locked(self.key, slots=2, backend=self.alias)
        def decorated() -> bool:
            return self.enters(slots=2) and not self.enters()

        @locked(self.key, shared=True, backend=self.alias)
        async def coroutine() -> bool:
            async with task_lock(self.key, shared=True, backend=self.alias) as acquired:
                return acquired and not await self.lock().aacquire()

        self.assertTrue(decorated())
        self.assertTrue(asyncio.run(coroutine()))
        with (
            task_lock(self.key, slots=1, backend=self.alias) as first,
            task_lock(self.key, slots=1, backend=self.alias) as second,
        ):
            self.assertEqual((first, second), (True, False))
        with self.lock(slots=2) as held, self.assertRaises(LockNotAcquiredError) as caught, self.lock():
            self.fail("let in beside a place")
        self.assertIn("held by", str(caught.exception))
        self.assertEqual(held.slot, 0)
        self.assert_free()

    def test_guard_needs_an_exclusive_hold(self) -> None:
        for options in ({"slots": 2}, {"shared": True}):
            with self.lock(**options) as held, self.assertRaises(ValueError):
                held.guard()
            with self.assertRaises(ValueError):
                lock([self.key], backend=self.alias, **options).guard()

    def test_a_place_is_kept_by_renewal_and_extended(self) -> None:
        self.needs("leases")
        with self.lock(slots=2, ttl=KEPT) as placed, self.lock(shared=True, ttl=KEPT) as shared:
            for held in (placed, shared):
                self.is_renewed(held)
                self.is_renewed(held)
                self.assertTrue(held.extend())
            time.sleep(KEPT)
            self.assert_refused()
            self.assertTrue(placed.held and shared.held)
        self.assert_free()

    def test_a_place_that_was_not_renewed_comes_free(self) -> None:
        self.needs("leases")
        late = [self.hold(slots=2, ttl=SHORT), self.hold(shared=True, ttl=SHORT), self.hold(slots=2, ttl=LONG)]
        eventually(lambda: self.enters(slots=2), what="the place comes free")
        eventually(lambda: late[0].lost and late[1].lost)
        self.assertTrue(late[2].held)
        self.assert_refused()
        late[2].release()
        self.assert_free()

    def test_reaping_counts_members(self) -> None:
        self.needs("leases", "listing")
        reap_expired_locks(backend=self.alias)
        late = [self.hold(slots=2, ttl=SHORT), self.hold(shared=True, ttl=SHORT), self.hold(slots=3, ttl=LONG)]
        eventually(lambda: len(list(held_locks(key=self.key, backend=self.alias))) == 1)
        self.assertEqual(reap_expired_locks(grace=3600, backend=self.alias), 0)
        self.assertEqual(reap_expired_locks(backend=self.alias), 2)
        self.assertTrue(late[2].extend())
        self.assert_refused()

    def test_what_is_held_is_told(self) -> None:
        self.needs("listing")
        held = [self.hold(slots=3, note="a"), self.hold(slots=3, note="b"), self.hold(shared=True, note="c")]

        def told() -> list[tuple[Any, ...]]:
            found = held_locks(key=self.key, backend=self.alias)
            return sorted((each.holder.note, each.slot, each.slots, each.shared) for each in found if each.holder)

        expected = [("a", 0, 3, False), ("b", 1, 3, False), ("c", None, None, True)]
        eventually(lambda: told() == expected, what=f"{expected} is told")
        everything = [each for each in held_locks(backend=self.alias) if each.name == self.key.name]
        self.assertEqual(sorted(each.fencing_token or 0 for each in everything), [each.fencing_token for each in held])
        some = lock_info(self.key, backend=self.alias)
        self.assertIsNotNone(some)
        for each in held:
            mine = each.info()
            assert mine is not None
            self.assertEqual(
                (mine.fencing_token, mine.slot, mine.owner_id), (each.fencing_token, each.slot, each.owner_id)
            )
        for each in held:
            self.assertTrue(task_lock_is_held(self.key, backend=self.alias))
            each.release()
        self.assertFalse(task_lock_is_held(self.key, backend=self.alias))
        self.assertEqual(told(), [])

    def test_force_release_ends_all_or_the_one_that_was_seen(self) -> None:
        self.needs("listing")
        held = [self.hold(slots=3, ttl=LONG), self.hold(slots=3, ttl=LONG), self.hold(shared=True, ttl=LONG)]

        def end(**only: Any) -> bool:
            return force_release(self.key, reason="a test", backend=self.alias, **only)

        self.assertTrue(end(fencing_token=held[1].fencing_token))
        self.assertFalse(end(fencing_token=held[1].fencing_token))
        eventually(lambda: held[1].lost)
        self.assertEqual(self.hold(slots=3).slot, 1)
        self.assertTrue(held[0].extend() and held[2].extend())
        self.assertTrue(end())
        for each in (held[0], held[2]):
            eventually(functools.partial(getattr, each, "lost"))
            self.assertFalse(each.release())
        self.assert_free()

    def test_the_loss_of_one_is_no_loss_of_another(self) -> None:
        self.needs("listing")
        with self.lock(slots=2) as kept:
            with self.assertRaises(LockLostError), self.lock(slots=2) as held:
                force_release(self.key, fencing_token=held.fencing_token, backend=self.alias)
                eventually(lambda: held.lost)
                self.assertEqual(self.hold(slots=2).slot, 1)
            self.assertTrue(kept.extend())
            self.assertFalse(kept.lost)

    def test_detached_places_are_attached(self) -> None:
        self.needs("leases")
        for options in ({"slots": 2}, {"shared": True}):
            with self.subTest(options=options):
                held = self.lock(**options)
                self.assertTrue(held.acquire())
                token, owner = held.fencing_token, held.detach()
                self.assert_refused()
                with attach_lock(self.key, owner, backend=self.alias) as attached:
                    self.assertEqual((attached.fencing_token, attached.slot), (token, held.slot))
                    self.assertTrue(attached.extend())
                    self.assert_refused()
                with self.assertRaises(LockLostError):
                    attach_lock(self.key, owner, backend=self.alias)
                self.assert_free()

    def test_a_place_stays_taken_for_its_least_time(self) -> None:
        self.needs("leases")
        with self.lock(slots=1, hold_at_least=KEPT):
            pass
        self.assert_refused(slots=1)
        self.assert_refused()
        eventually(lambda: self.enters(slots=1), what="the place comes free")

    def test_one_object_lets_so_many_threads_in(self) -> None:
        inside, most = Inside(), threading.Semaphore(3)
        shared = self.lock(slots=3, timeout=20)

        def work() -> None:
            for _ in range(6):
                with shared as held:
                    self.assertTrue(most.acquire(blocking=False), "too many inside")
                    with inside:
                        self.assertTrue(held.held)
                        eventually(lambda: inside.most == 3, what="three are inside")
                    most.release()

        for thread in [self.in_background(work) for _ in range(8)]:
            thread.result()
        self.assertEqual(inside.entered, 48)
        self.assertEqual(inside.most, 3)
        self.assert_free()

    def test_so_many_tasks_are_let_in(self) -> None:
        inside, together = Inside(), asyncio.Event()

        async def work() -> None:
            for _ in range(4):
                async with self.lock(slots=2, timeout=20):
                    with inside:
                        if inside.most == 2:
                            together.set()
                        await together.wait()

        async def main() -> None:
            async with asyncio.timeout(50), asyncio.TaskGroup() as group:
                for _ in range(6):
                    group.create_task(work())

        asyncio.run(main())
        self.assertEqual((inside.entered, inside.most), (24, 2))
        self.assert_free()


class PlacesInTransactions(TransactionCase):
    requires: ClassVar[Sequence[str]] = ("places",)

    def test_a_place_is_kept_until_the_commit(self) -> None:
        def test(using: str) -> None:
            for options in ({"slots": 1}, {"shared": True}):
                with transaction.atomic(using):
                    with self.lock(**options) as held:
                        token = held.fencing_token
                    self.assertFalse(self.elsewhere(), "the lock was freed before the commit")
                    with self.lock(**options) as held:
                        self.assertEqual(held.fencing_token, token, "it is taken again by its transaction")
                    self.write(using)
                self.assertTrue(self.elsewhere())
                self.sql(using, f"DELETE FROM {self.table}")

        self.each_database(test)

    def test_two_places_in_one_transaction(self) -> None:
        def test(using: str) -> None:
            with transaction.atomic(using):
                with self.lock(slots=2) as first, self.lock(slots=2) as second:
                    self.assertEqual((first.slot, second.slot), (0, 1))
                self.assertFalse(self.elsewhere())
                with self.assertRaises(LockNotAcquiredError), self.lock():
                    self.fail("let in beside two places")
            self.assertTrue(self.elsewhere())
            with contextlib.suppress(ZeroDivisionError), transaction.atomic(using):
                with self.lock(slots=1):
                    pass
                raise ZeroDivisionError
            with self.lock(slots=1, timeout=5):
                pass

        self.each_database(test)


class PlacesElsewhere(PlacesCase):
    """Between threads that wait, and between processes."""

    requires: ClassVar[Sequence[str]] = ("places", "verbs")

    def test_one_release_lets_all_shared_waiters_in(self) -> None:
        alone = self.hold()
        everybody = threading.Barrier(4)

        def wait() -> float:
            with self.lock(shared=True, timeout=20):
                got = now()
                everybody.wait(10)
                return got

        with self.calls_of("remaining") as asked:
            threads = [self.in_background(wait) for _ in range(4)]
            eventually(lambda: asked, what="one waits")
            time.sleep(0.2)
        released = now()
        alone.release()
        self.assertLess(max(thread.result() for thread in threads) - released, NOISE)

    def test_shared_holds_that_overlap_for_ever_let_an_exclusive_waiter_in(self) -> None:
        stop = threading.Event()
        self.addCleanup(stop.set)

        def cover() -> int:
            entered = 0
            while not stop.is_set():
                try:
                    with self.lock(shared=True):
                        entered += 1
                        time.sleep(0.1)
                except LockNotAcquiredError:
                    time.sleep(0.01)
            return entered

        threads = []
        for _ in range(4):
            threads.append(self.in_background(cover))
            time.sleep(0.025)
        started = now()
        with self.lock(timeout=20):
            waited = now() - started
            stop.set()
        self.assertGreater(sum(thread.result() for thread in threads), 3)
        self.assertLess(waited, 0.1 + 1.0 + NOISE)

    def test_the_word_of_a_waiter_that_gave_up_ends(self) -> None:
        held = self.hold(shared=True)
        self.assertFalse(self.lock().acquire(timeout=0.3))
        self.assertLess(self._until_shared_again(), WANTED_SECONDS)
        self.assertTrue(held.extend())

    def _until_shared_again(self) -> float:
        began = now()
        eventually(lambda: self.enters(shared=True), what="a shared hold is granted again")
        return now() - began

    def _is_kept_back(self, **options: Any) -> bool:
        return not self.enters(**options)

    def test_an_exclusive_waiter_keeps_new_ones_back_everywhere(self) -> None:
        waiter, other = self.new_peer(), self.peer()
        held = self.hold(shared=True)
        placed = self.hold(slots=2)
        waiter.begin(tasks.acquire, "a", self.key, 30, ttl=LONG, backend=self.alias)
        for options in ({"shared": True}, {"slots": 2}):
            eventually(functools.partial(self._is_kept_back, **options), what="new ones are kept back")
            self.assertFalse(other.call(tasks.acquire, "b", self.key, ttl=LONG, backend=self.alias, **options))
        self.assertTrue(held.extend() and placed.extend())
        started = now()
        held.release()
        placed.release()
        self.assertTrue(waiter.result())
        self.assertLess(now() - started, 1.0 + NOISE)
        self.assert_refused(shared=True)
        self.assertTrue(waiter.call(tasks.release, "a"))
        self.assert_free()

    def test_the_word_of_a_waiter_that_died_ends(self) -> None:
        waiter = self.new_peer()
        self.hold(shared=True)
        waiter.begin(tasks.acquire, "a", self.key, 60, ttl=LONG, backend=self.alias)
        eventually(lambda: not self.enters(shared=True), what="new ones are kept back")
        waiter.kill()
        self.assertLess(self._until_shared_again(), WANTED_SECONDS + NOISE)

    def test_the_place_of_a_process_that_dies_comes_free(self) -> None:
        peers = [self.new_peer(), self.new_peer()]
        for peer in peers:
            self.assertTrue(peer.call(tasks.acquire, "a", self.key, ttl=KEPT, slots=3, backend=self.alias))
        self.assertTrue(peers[0].call(tasks.acquire, "b", self.key, ttl=KEPT, shared=True, backend=self.alias))
        mine = self.hold(slots=3)
        self.assertEqual(mine.slot, 2)
        self.assert_refused(slots=3)
        for peer in peers:
            peer.kill()
        started = now()
        eventually(lambda: self.enters(slots=2), what="the places come free")
        self.assertLess(now() - started, KEPT + NOISE)
        self.assertTrue(mine.extend())
        self.assert_refused()
        mine.release()
        self.becomes_free()

    def test_a_place_that_comes_free_elsewhere_wakes_a_waiter(self) -> None:
        peer = self.peer()
        self.assertTrue(peer.call(tasks.acquire, "a", self.key, ttl=LONG, slots=2, backend=self.alias))
        self.hold(slots=2)
        with self.calls_of("remaining") as asked:
            waiter = self.in_background(lambda: self.lock(slots=2, timeout=20).acquire() and now())
            eventually(lambda: asked, what="it waits")
            time.sleep(0.2)
        started = now()
        self.assertTrue(peer.call(tasks.release, "a"))
        self.assertLess(waiter.result() - started, NOISE)

    def test_processes_and_threads_of_all_kinds_are_inside_together_only_as_they_may(self) -> None:
        peers = [self.peer() for _ in range(3)]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for seed, peer in enumerate(peers):
                peer.begin(tasks.enter_at_random, folder, self.key, seed, 25, 3, ttl=LONG, backend=self.alias)
            options: dict[str, Any] = {"ttl": LONG, "backend": self.alias}
            mine = [
                self.in_background(tasks.enter_at_random, folder, self.key, 10 + seed, 25, 3, **options)
                for seed in range(2)
            ]
            seen = [peer.result(50) for peer in peers] + [thread.result(50) for thread in mine]
        self.assertEqual([each["wrong"] for each in seen if each["wrong"]], [])
        self.assertEqual(sum(sum(each["entered"].values()) for each in seen), 125)
        self.assertGreater(max(each["most"] for each in seen), 1)
        self.assert_free()

    def test_exceptions_at_random_instants_leave_no_place_behind(self) -> None:
        peer = self.new_peer()
        seen = peer.call(tasks.storm, self.key, 100, ttl=LONG, slots=1, backend=self.alias, within=50)
        self.assertEqual(seen["unexpected"], [], seen)
        self.becomes_free(within=8)
