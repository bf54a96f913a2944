"""Promise 6: how long a caller waits, who wakes it, and in which order."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any
from unittest import mock

from ...clock import now
from ...errors import LockBackendError, LockNotAcquiredError
from ...keys import LockKey
from . import tasks
from .base import LONG, NOISE, SHORT, Background, ContractCase, eventually

#: What a lost wake-up may cost, in seconds.
FALLBACK = 1.0


class Waiting(ContractCase):
    def waiter(self) -> Background:
        """A thread that waits for the lock; returns when it has asked the backend how long that may take."""

        def wait() -> float:
            with self.lock(timeout=20):
                return now()

        with self.calls_of("remaining") as asked:
            thread = self.in_background(wait)
            eventually(lambda: asked, what="it waits")
        return thread

    def test_a_timeout_of_zero_gets_a_free_lock(self) -> None:
        for timeout in (0, 0.0, timedelta(0)):
            held = self.lock()
            self.assertIs(held.acquire(timeout), True)
            held.release()
        with self.lock(timeout=0):
            self.assert_held()

    def test_a_free_lock_is_taken_at_once_whatever_the_timeout(self) -> None:
        for timeout in (math.inf, 60, timedelta(minutes=1)):
            started = now()
            with self.lock(timeout=timeout):
                self.assertLess(now() - started, NOISE)

    def test_s17_a_wait_ends_when_its_time_is_over(self) -> None:
        with self.lock():
            started = now()
            self.assertIs(self.lock().acquire(timeout=timedelta(milliseconds=1500)), False)
            waited = [now() - started]
            started = now()
            with self.assertRaises(LockNotAcquiredError), self.lock(timeout=1.5):
                self.fail("two holders")
            waited.append(now() - started)
            self.assertGreaterEqual(min(waited), 1.5)
            self.assertLess(min(waited), 1.5 + 0.5)
            self.assertLess(max(waited), 1.5 + NOISE)

    def test_s17_several_waiters_all_end_when_their_time_is_over(self) -> None:
        def wait() -> float:
            started = now()
            self.assertIs(self.lock().acquire(timeout=1.5), False)
            return now() - started

        with self.lock():
            for waited in [thread.result() for thread in [self.in_background(wait) for _ in range(10)]]:
                self.assertGreaterEqual(waited, 1.5)
                self.assertLess(waited, 1.5 + NOISE)

    def test_a_lease_that_ends_lets_a_waiter_in(self) -> None:
        self.needs("leases")
        late = self.lock(ttl=SHORT)
        late.acquire()
        with self.lock(timeout=SHORT + NOISE + 5):
            self.assertTrue(late.lost)

    def _hand_over_from(self, peer: Any) -> float:
        self.assertTrue(peer.call(tasks.acquire, "a", self.key, ttl=LONG, backend=self.alias))
        thread = self.waiter()
        time.sleep(0.1)
        released = now()
        peer.call(tasks.release, "a")
        return float(thread.result()) - released

    def test_a_release_in_another_process_wakes_a_waiter(self) -> None:
        self.needs("verbs")
        peer = self.peer()
        self.assertTrue(any(self._hand_over_from(peer) < FALLBACK / 2 for _ in range(5)))

    def test_s18_a_lost_wake_up_costs_the_fallback_interval(self) -> None:
        self.needs("verbs")
        peer = self.peer()

        def deaf(seconds: float) -> Collection[str]:
            time.sleep(min(seconds, 0.2))
            return ()

        with mock.patch.object(self.backend, "wait_for_change", deaf):
            time.sleep(0.3)
            self.assertLess(self._hand_over_from(peer), FALLBACK + NOISE)

    def test_s18_a_watcher_that_fails_costs_the_fallback_interval(self) -> None:
        self.needs("verbs")
        peer = self.peer()
        with mock.patch.object(self.backend, "wait_for_change", side_effect=LockBackendError("deaf")):
            self.assertLess(self._hand_over_from(peer), FALLBACK + NOISE)

    def test_s21_two_threads_that_wait_for_each_other_both_end(self) -> None:
        other = self.new_key()
        both = threading.Barrier(2)

        def work(first: LockKey, second: LockKey) -> bool:
            with self.lock(first):
                both.wait(10)
                return self.lock(second).acquire(timeout=0.5)

        started = now()
        threads = [self.in_background(work, self.key, other), self.in_background(work, other, self.key)]
        answers = [thread.result() for thread in threads]
        self.assertLess(now() - started, 0.5 + 2 * NOISE)
        self.assertLess(sum(answers), 2)
        self.becomes_free()
        self.becomes_free(other)

    def test_s36_the_holder_goes_between_the_refusal_and_the_look(self) -> None:
        self.needs("listing")
        held = self.lock()
        held.acquire()
        real = self.backend.inspect

        def look(name: str, deadline: float) -> Any:
            held.release()
            return real(name, deadline)

        with (
            mock.patch.object(self.backend, "inspect", look),
            self.assertRaises(LockNotAcquiredError) as caught,
            self.lock(),
        ):
            self.fail("two holders")
        self.assertIsNone(caught.exception.holder)
        self.assert_free()
