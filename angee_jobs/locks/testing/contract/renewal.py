"""Promises 4 and 12: leases are renewed while a block runs and no longer, and that costs one thread."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, ClassVar
from unittest import mock

from ...backends.base import Extension
from ...clock import now
from ...errors import LockBackendError, LockLostError
from ...keys import LockKey
from ...lock import Lock
from .base import LONG, NOISE, RENEWED, SHORT, ContractCase, eventually


class Renewal(ContractCase):
    """Promise 4."""

    requires: ClassVar[Sequence[str]] = ("leases",)

    def test_a_block_keeps_its_lease_for_several_ttls(self) -> None:
        with self.lock(ttl=RENEWED) as held:
            before = held.expires_at
            until = now() + RENEWED * 1.2
            while now() < until:
                self.assertTrue(held.held)
                self.assert_held()
                time.sleep(0.1)
            after = held.expires_at
            if before is not None and after is not None:
                self.assertGreater(after, before)
        self.assert_free()

    def test_a_hold_without_a_block_is_not_renewed_but_watched(self) -> None:
        with self.hear("lock_lost") as heard:
            held = self.lock(ttl=SHORT)
            held.acquire()
            self.becomes_free(within=SHORT + NOISE)
            eventually(lambda: heard, NOISE, "lock_lost is sent")
        self.assertTrue(held.lost)
        self.assertFalse(held.held)

    def test_a_block_that_does_not_extend_ends_with_its_lease(self) -> None:
        with self.assertRaises(LockLostError), self.lock(ttl=SHORT, auto_extend=False) as held:
            self.becomes_free(within=SHORT + NOISE)
            self.assertTrue(held.lost)

    def _extend(self, change: Any) -> Any:
        """Replace the backend's extend() by ``change(real, extensions, deadline)``."""
        real = self.backend.extend

        def extend(extensions: Sequence[Extension], deadline: float) -> Collection[str]:
            names = {each.name for each in extensions}
            if not any(f":{self._testMethodName}:" in name for name in names):
                return real(extensions, deadline)
            return change(real, extensions, deadline)  # type: ignore[no-any-return]

        return mock.patch.object(self.backend, "extend", extend)

    def test_s06_one_renewal_fails_and_the_hold_survives(self) -> None:
        calls: list[int] = []

        def fail_once(real: Any, extensions: Sequence[Extension], deadline: float) -> Any:
            calls.append(threading.get_ident())
            if len(calls) == 1:
                raise LockBackendError("the network was away for a moment")
            return real(extensions, deadline)

        with self.hear("lock_lost") as heard, self._extend(fail_once), self.lock(ttl=RENEWED) as held:
            until = now() + RENEWED * 1.2
            while now() < until:
                self.assertTrue(held.held)
                time.sleep(0.05)
            self.assert_held()
            # A backend that failed has a thread of its own until it has been prompt again.
            eventually(lambda: len(calls) > 2 and calls[-1] == calls[-2], what="one thread renews again and again")
        self.assertEqual(heard, [])
        self.assert_free()

    def test_s09_500_holds_at_a_server_that_takes_50_ms_a_call(self) -> None:
        def take_50_ms(real: Any, extensions: Sequence[Extension], deadline: float) -> Any:
            time.sleep(0.05)
            return real(extensions, deadline)

        entered, over = threading.Barrier(6), threading.Event()
        self.addCleanup(over.set)
        everything: list[Lock] = []

        def hold_100() -> list[LockKey]:
            keys = [self.new_key() for _ in range(100)]
            with contextlib.ExitStack() as stack:
                holds = [stack.enter_context(self.lock(key, ttl=6)) for key in keys]
                everything.extend(holds)
                entered.wait(30)
                while not over.wait(0.1):
                    self.assertTrue(all(each.held for each in holds))
                for each in holds[::20]:
                    self.assertFalse(self.lock(each.key).acquire())
            return keys  # and no block raised LockLostError

        with self.hear("lock_lost") as heard, self._extend(take_50_ms):
            threads = [self.in_background(hold_100) for _ in range(5)]
            entered.wait(30)
            ends = {each: each.expires_at for each in everything}
            # One after the other would take 25 s, and so far longer than a lease.
            eventually(lambda: all(each.expires_at != end for each, end in ends.items()), what="each is renewed")
            over.set()
            for thread in threads:
                self.assertEqual(len(thread.result(30)), 100)
        self.assertEqual(heard, [])

    def test_s11_a_release_during_a_renewal_wins(self) -> None:
        for late in ("before", "after"):
            with self.subTest(f"the renewal is held up {late} it reaches the storage"):
                self._release_during_a_renewal(late)

    def _release_during_a_renewal(self, late: str) -> None:
        under_way, go_on, done = threading.Event(), threading.Event(), threading.Event()
        self.addCleanup(go_on.set)
        key = self.new_key()

        def hold_up(real: Any, extensions: Sequence[Extension], deadline: float) -> Any:
            if not any(each.name == key.name for each in extensions):
                return real(extensions, deadline)
            answer = real(extensions, deadline) if late == "after" else None
            under_way.set()
            go_on.wait(10)
            try:
                return real(extensions, deadline) if answer is None else answer
            finally:
                done.set()

        with self.hear("lock_lost") as heard, self._extend(hold_up):
            held = self.lock(key, ttl=RENEWED)
            held.__enter__()
            self.assertTrue(under_way.wait(10))
            leaving = self.in_background(held.release)
            leaving.join(0.1)  # it may wait for the renewal
            go_on.set()
            self.assertIs(leaving.result(), True)
            self.assertTrue(done.wait(10))
            held.__exit__(None, None, None)
            self.assert_free(key)
            time.sleep(0.2)
            self.assert_free(key, "a renewal brought the hold back")
        self.assertEqual(heard, [])

    def test_s46_a_hold_in_a_reference_cycle_is_given_up(self) -> None:
        def drop(enter: bool) -> None:
            held = self.lock(ttl=LONG)
            if enter:
                held.__enter__()
            else:
                held.acquire()
            cycle: list[Any] = [held]
            cycle.append(cycle)

        for enter in (True, False):
            drop(enter)
            gc.collect()
            self.becomes_free()
