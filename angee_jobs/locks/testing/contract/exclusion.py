"""Promises 1 to 3: one hold per key, which only its owner can touch, free after a crash; and 8: whose clock decides."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...backends.base import OPERATION_SECONDS, Extension
from ...clock import now
from ...errors import LockLostError, LockNotAcquiredError
from ...keys import LockKey, record_lock_key
from ...lock import Lock
from . import tasks
from .base import KEPT, LONG, NOISE, RENEWED, SHORT, ContractCase, eventually
from .peers import Peer


class Exclusion(ContractCase):
    """Promise 1."""

    def test_a_free_lock_is_granted_and_comes_free_again(self) -> None:
        for _ in range(3):
            held = self.lock()
            self.assertIs(held.acquire(), True)
            self.assertTrue(held.held)
            self.assert_held()
            self.assertIs(held.release(), True)
            self.assertFalse(held.held)
            self.assertFalse(held.lost)
            self.assert_free()

    def test_a_block_holds_the_lock_and_frees_it(self) -> None:
        held = self.lock()
        with held as entered:
            self.assertIsInstance(entered, Lock)
            self.assertIs(entered.held, True)
            self.assert_held()
            with self.assertRaises(LockNotAcquiredError), self.lock():
                self.fail("two holders")
            self.assert_held()
        self.assert_free()

    def test_the_very_thread_that_holds_the_lock_is_refused_too(self) -> None:
        held = self.lock()
        self.assertTrue(held.acquire())
        self.assertFalse(held.acquire(), "this object has the lock already")
        self.assertFalse(self.lock().acquire(), "this thread has the lock already")
        self.assertTrue(held.held, "the refused try cost the hold")
        self.assertTrue(held.release())
        self.assert_free()

    def test_releasing_twice_or_without_a_hold_is_false(self) -> None:
        held = self.lock()
        self.assertIs(held.release(), False)
        held.acquire()
        self.assertIs(held.release(), True)
        self.assertIs(held.release(), False)
        self.assertIs(held.extend(), False)

    def test_threads_are_never_inside_together(self) -> None:
        inside: list[int] = []
        together: list[int] = []

        def work() -> None:
            for _ in range(5):
                with self.lock(timeout=60):
                    inside.append(1)
                    time.sleep(0.001)
                    if len(inside) > 1:
                        together.append(len(inside))
                    inside.pop()

        for thread in [self.in_background(work) for _ in range(8)]:
            thread.result(60)
        self.assertEqual(together, [])

    def _counter(self) -> Path:
        descriptor, path = tempfile.mkstemp()
        os.write(descriptor, b"0")
        os.close(descriptor)
        self.addCleanup(os.unlink, path)
        return Path(path)

    def test_s16_100_threads_in_4_processes_count_exactly(self) -> None:
        """In one process, for a backend that does not exclude other processes."""
        path = self._counter()
        options: dict[str, Any] = {"ttl": 10, "backend": self.alias}
        if "processes" in self.strategy.lacks:
            tasks.count(path, self.key, threads=100, **options)
        else:
            peers = [self.peer() for _ in range(4)]
            for peer in peers:
                peer.begin(tasks.count, path, self.key, threads=25, **options)
            for peer in peers:
                peer.result(60)
        self.assertEqual(path.read_text(), "100")

    def test_processes_exclude_each_other(self) -> None:
        peer = self.peer()
        self.assertTrue(peer.call(tasks.acquire, "a", self.key, ttl=LONG, backend=self.alias))
        self.assert_held()
        self.assertTrue(peer.call(tasks.release, "a"))
        self.assertTrue((mine := self.lock()).acquire())
        self.assertFalse(peer.call(tasks.acquire, "a", self.key, ttl=LONG, backend=self.alias))
        mine.release()

    def test_s34_different_keys_are_different_locks(self) -> None:
        own = int(self.key.parts[1], 16)
        names = ["a:b", "a", "b", "A", "a%3Ab", "%", "ä", "ß", "😀", " ", "a\x00b", "a\nb", "'; --", "\ud800"]
        keys = [LockKey("contract", (*self.key.parts, name)) for name in names]
        keys += [LockKey("contract", (*self.key.parts, "a", "b")), LockKey("contract", (*self.key.parts, "a:", "b"))]
        keys += [LockKey("contract", (*self.key.parts, "x" * 10_000 + last)) for last in "yz"]
        keys += [record_lock_key("messaging.Channel", own, purpose) for purpose in ("sync", "SYNC")]
        self.assertEqual(len({key.name for key in keys}), len(keys))
        holds = [self.lock(key) for key in keys]
        for each in holds:
            self.assertTrue(each.acquire(), f"{each.name[:80]!r} met another key")
        for each in holds:
            self.assertFalse(self.lock(each.key).acquire())
            self.assertTrue(self.backend.is_held(each.key))
        for each in holds:
            self.assertTrue(each.release())
            self.assertFalse(self.backend.is_held(each.key))

    def test_s34_two_spellings_of_one_key_are_one_lock(self) -> None:
        own = int(self.key.parts[1], 16)
        with self.lock(record_lock_key("messaging.Channel", own, "sync")):
            self.assertFalse(self.lock(record_lock_key("messaging.Channel", str(own), "sync")).acquire())
        plain = "/".join(self.key.parts)
        with self.lock(LockKey("name", (plain,))):
            from ...api import lock

            self.assertFalse(lock(plain, backend=self.alias).acquire())

    def test_s34_two_keys_nest_in_one_thread(self) -> None:
        other = self.new_key()
        with self.lock(), self.lock(other):
            self.assert_held()
            self.assert_held(other)
        self.assert_free()
        self.assert_free(other)


class Ownership(ContractCase):
    """Promise 2."""

    def test_s01_late_release_of_an_expired_hold(self) -> None:
        self.needs("leases")
        late, newer = self.lock(ttl=SHORT), self.lock(timeout=5)
        self.assertTrue(late.acquire())
        self.assertTrue(newer.acquire())
        self.assertTrue(late.lost)
        self.assertIs(late.release(), False)
        self.assertIs(late.extend(), False)
        self.assertTrue(newer.held)
        self.assert_held()
        self.assertTrue(newer.release())

    def test_s01_the_block_of_an_expired_hold_raises(self) -> None:
        self.needs("leases")
        newer = self.lock(timeout=5)
        with self.assertRaises(LockLostError), self.lock(ttl=SHORT, auto_extend=False):
            self.assertTrue(newer.acquire())
        self.assert_held()
        self.assertTrue(newer.release())

    def test_a_stranger_neither_releases_nor_extends(self) -> None:
        self.needs("leases")
        mine = self.lock()
        mine.acquire()
        stranger = "0" * 32
        limit = now() + OPERATION_SECONDS
        self.assertIs(self.backend.release(self.key.name, stranger, limit), False)
        self.assertEqual(list(self.backend.extend([Extension(self.key.name, stranger, LONG)], limit)), [])
        self.assert_held()
        self.assertTrue(mine.release())

    def test_an_expired_hold_stays_expired_though_nobody_took_it(self) -> None:
        self.needs("leases")
        held = self.lock(ttl=SHORT)
        held.acquire()
        owner = held.owner_id
        assert owner is not None
        eventually(lambda: not self.backend.is_held(self.key), what="the lease ends")
        limit = now() + OPERATION_SECONDS
        self.assertEqual(list(self.backend.extend([Extension(self.key.name, owner, LONG)], limit)), [])
        self.assertFalse(self.backend.is_held(self.key))
        self.assertIs(self.backend.release(self.key.name, owner, limit), False)
        self.assertIs(held.extend(), False)
        self.assert_free()

    def test_extend_moves_the_end_and_never_shortens(self) -> None:
        self.needs("leases")
        held = self.lock(ttl=KEPT)
        held.acquire()
        self.assertIs(held.extend(LONG), True)
        self.assertIs(held.extend(KEPT), True)
        time.sleep(KEPT + 0.1)
        self.assertTrue(held.held)
        self.assert_held()
        held.release()

    def test_s02_two_processes_that_look_the_same(self) -> None:
        one, two = self.peer(), self.peer()
        for peer in (one, two):
            peer.call(tasks.pretend_to_be, "container", 1)
        self.assertTrue(one.call(tasks.acquire, "a", self.key, ttl=LONG, backend=self.alias))
        self.assertEqual(*(peer.call(tasks.says_who_it_is) for peer in (one, two)))
        self.assertFalse(two.call(tasks.acquire, "a", self.key, ttl=LONG, backend=self.alias))
        self.assertIs(two.call(tasks.release, "a"), False)
        self.assertIs(two.call(tasks.extend, "a"), False)
        self.assert_held()
        self.assertTrue(one.call(tasks.extend, "a"))
        self.assertTrue(one.call(tasks.release, "a"))

    def test_s03_a_hold_that_was_deleted_by_hand_is_not_renewed_back(self) -> None:
        self.needs("delete_hold", "leases")
        with self.hear("lock_lost") as heard:
            with self.assertRaises(LockLostError), self.lock(ttl=KEPT) as held:
                self.strategy.delete_hold(self.key)
                self.assertFalse(self.backend.is_held(self.key))
                eventually(lambda: held.lost, KEPT + NOISE, "the holder learns it")
                with self.assertRaises(LockLostError):
                    held.check()
                self.assertFalse(self.backend.is_held(self.key), "a renewal brought the hold back")
                self.assertIs(held.extend(), False)
            eventually(lambda: heard)
        self.assertEqual(len(heard), 1)
        self.assert_free()

    def test_s03_the_next_hold_after_a_deleted_one_is_left_alone(self) -> None:
        self.needs("delete_hold", "leases")
        with self.assertRaises(LockLostError), self.lock(ttl=KEPT) as held:
            self.strategy.delete_hold(self.key)
            newer = self.lock()
            self.assertTrue(newer.acquire())
            eventually(lambda: held.lost, KEPT + NOISE, "the holder learns it")
        self.assertTrue(newer.held)
        self.assert_held()
        self.assertTrue(newer.release())


class Crash(ContractCase):
    """Promise 3."""

    def test_a_killed_holder_frees_the_lock_within_its_ttl(self) -> None:
        peer = self.peer()
        peer.call(tasks.enter, "a", self.key, ttl=KEPT, backend=self.alias)
        time.sleep(KEPT * 0.6)  # it has been renewed
        self.assert_held()
        peer.kill()
        killed = now()
        new_owner = self.lock(timeout=KEPT + NOISE + 5)
        self.assertTrue(new_owner.acquire())
        self.assertLess(now() - killed, KEPT + NOISE)
        new_owner.release()

    def test_s19_a_waiter_gets_the_lock_of_a_killed_holder(self) -> None:
        peer = self.peer()
        peer.call(tasks.enter, "a", self.key, ttl=KEPT, backend=self.alias)
        started = threading.Barrier(4)
        entered: list[float] = []

        def wait() -> None:
            started.wait(10)
            with self.lock(timeout=20):
                entered.append(now())

        waiting = [self.in_background(wait) for _ in range(3)]
        started.wait(10)
        self.assert_held()
        self.assertEqual(entered, [])
        peer.kill()
        killed = now()
        for thread in waiting:
            thread.result()
        self.assertLess(min(entered) - killed, KEPT + NOISE)
        self.assertEqual(len(entered), 3)

    def test_a_waiter_that_is_killed_leaves_nothing(self) -> None:
        peer = self.peer()
        with self.lock():
            peer.begin(tasks.acquire, "a", self.key, 30, ttl=LONG, backend=self.alias)
            time.sleep(0.3)
            peer.kill()
        self.assert_free()


class Clock(ContractCase):
    """Promise 8."""

    def test_s38_a_client_clock_an_hour_off_makes_no_difference(self) -> None:
        keys, ahead, behind = [self.new_key(), self.new_key()], self.peer(), self.peer()
        ahead.call(tasks.shift_clock, 3600.0)
        behind.call(tasks.shift_clock, -3600.0)
        self.assertGreater(ahead.call(tasks.read_clock) - behind.call(tasks.read_clock), 7000)
        self.clocks_make_no_difference((ahead, behind), keys)

    def clocks_make_no_difference(self, peers: Sequence[Peer], keys: Sequence[LockKey], tokens: bool = True) -> None:
        """Each of the peers, which have clocks of their own, and this process exclude each other on a key.

        With ``tokens``, none of their clocks is in a fencing token.
        """
        options: dict[str, Any] = {"ttl": RENEWED, "backend": self.alias}
        pairs = list(zip(peers, keys, strict=True))
        before = [peer.call(tasks.enter, "a", key, **options) for peer, key in pairs]
        time.sleep(RENEWED * 1.1)
        for peer, key in pairs:
            self.assert_held(key, "the clock of the holder ended its lease")
            self.assertFalse(peer.call(tasks.is_lost, "a"))
            peer.call(tasks.leave, "a")
        with contextlib.ExitStack() as stack:
            mine = [stack.enter_context(self.lock(key)).fencing_token for key in keys]
            for peer, key in pairs:
                self.assertFalse(peer.call(tasks.acquire, "b", key, **options), "a client's clock took it over")
        after = []
        for peer, key in pairs:
            after.append(peer.call(tasks.enter, "a", key, **options))
            peer.call(tasks.leave, "a")
        if "fencing" not in self.strategy.lacks:
            for first, second, third in zip(before, mine, after, strict=True):
                self.assertLess(first, second)
                self.assertLess(second, third)
                if tokens:
                    self.assertLess(third - first, 600e6, "a client's clock is in the fencing token")
