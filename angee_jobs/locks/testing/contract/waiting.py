"""Promise 6: how long a caller waits, who wakes it, and in which order."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any
from unittest import mock

from ... import waiting
from ...backends.base import VERB_SECONDS
from ...clock import now
from ...errors import LockBackendError, LockNotAcquiredError
from ...holder import describe_holder
from ...keys import LockKey
from ...waiting import room_of
from . import tasks
from .base import LONG, NOISE, SHORT, Background, ContractCase, eventually

#: What a lost wake-up may cost, in seconds.
FALLBACK = 1.0


class Waiting(ContractCase):
    def waiter(self, key: LockKey | None = None, timeout: float = 20, then: Callable[[], object] = int) -> Background:
        """A thread that waits for the lock, once it stands in line."""
        key = key or self.key
        room = room_of(self.backend)
        line = room.lines.get(key.name)
        before = len(line.bells) if line is not None else 0

        def wait() -> float:
            with self.lock(key, timeout=timeout):
                then()
                return now()

        thread = self.in_background(wait)
        eventually(
            lambda: (line := room.lines.get(key.name)) is not None and len(line.bells) == before + 1,
            what="it stands in line",
        )
        return thread

    def test_without_a_timeout_the_lock_is_tried_once(self) -> None:
        with self.lock(), mock.patch.object(room_of(self.backend), "join", side_effect=AssertionError("it waits")):
            self.assertIs(self.lock().acquire(), False)
            self.assertIs(self.lock().acquire(timeout=0), False)
            self.assertIs(self.lock(timeout=0).acquire(), False)

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

    def test_waiters_of_one_process_are_served_in_order(self) -> None:
        self.needs("verbs")
        order: list[int] = []
        with self.lock():
            threads = [self.waiter(then=functools.partial(order.append, number)) for number in range(8)]
        for thread in threads:
            thread.result()
        self.assertEqual(order, list(range(8)))

    def test_a_newcomer_does_not_overtake_those_who_wait(self) -> None:
        self.needs("verbs")
        order: list[str] = []
        held = self.lock()
        held.acquire()
        first = self.waiter(then=lambda: order.append("first"))
        second = self.waiter(then=lambda: order.append("second"))
        held.release()
        with self.lock(timeout=20):
            order.append("newcomer")
        first.result()
        second.result()
        self.assertEqual(order, ["first", "second", "newcomer"])

    def test_the_next_in_line_takes_over_when_the_first_gives_up(self) -> None:
        self.needs("verbs", "leases")
        # A hold of nobody in this process, so that nothing here rings when it ends.
        owner, limit = "f" * 32, now() + VERB_SECONDS
        self.assertTrue(self.backend.acquire(self.key.name, owner, LONG, describe_holder("", LONG), limit))
        first = self.in_background(self.lock(timeout=0.5).acquire)
        eventually(lambda: self.key.name in room_of(self.backend).lines or not first.is_alive())
        held = self.lock()
        second = self.in_background(held.acquire, 20)
        self.assertIs(first.result(), False)
        self.assertTrue(self.backend.release(self.key.name, owner, now() + VERB_SECONDS))
        self.assertIs(second.result(2 * FALLBACK + NOISE), True)
        self.assertTrue(held.release())

    def test_one_waiter_asks_for_all(self) -> None:
        self.needs("verbs")
        calls: list[int | None] = []

        def note(real: Any) -> Any:
            def verb(name: str, *args: Any) -> Any:
                if name == self.key.name:
                    calls.append(threading.get_ident())
                return real(name, *args)

            return verb

        with self.lock():
            threads = [self.waiter() for _ in range(8)]
            time.sleep(0.1)
            with contextlib.ExitStack() as stack:
                for verb in ("acquire", "acquire_next", "remaining"):
                    stack.enter_context(mock.patch.object(self.backend, verb, note(getattr(self.backend, verb))))
                time.sleep(FALLBACK * 1.2)
            self.assertLessEqual(len(set(calls)), 1, "more than the head of the line asked the backend")
            self.assertLess(len(calls), 10, "the head of the line asks again and again")
        for thread in threads:
            thread.result()

    def test_a_release_in_this_process_wakes_a_waiter(self) -> None:
        self.needs("verbs")

        def handover() -> float:
            held = self.lock()
            held.acquire()
            thread = self.waiter()
            released = now()
            held.release()
            return float(thread.result()) - released

        self.assertTrue(any(handover() < FALLBACK / 2 for _ in range(5)))

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

    def test_a_waiter_that_was_turned_away_from_a_free_lock_asks_again_soon(self) -> None:
        """Somebody else's request was under way, and came to nothing: no release will be told."""
        self.needs("verbs")
        real, turned_away = self.backend.acquire_next, threading.Event()

        def acquire_next(*args: Any) -> Any:
            if turned_away.is_set():
                return real(*args)
            turned_away.set()
            return None

        held = self.lock(ttl=LONG)
        held.acquire()
        with (
            mock.patch.object(self.backend, "acquire_next", acquire_next),
            mock.patch.object(waiting, "FALLBACK_SECONDS", 3600.0),
        ):
            thread = self.waiter()
            held.release()
            thread.result(10)
        self.assertTrue(turned_away.is_set())

    def test_s20_a_waiter_struck_by_an_exception_leaves_the_line(self) -> None:
        self.needs("verbs")
        with self.lock():
            struck, behind = self.waiter(), self.waiter()
            assert struck.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(struck.ident), ctypes.py_object(ZeroDivisionError)
            )
            with self.assertRaises(ZeroDivisionError):
                struck.result()
        behind.result()
        self.assert_free()

    def test_s20_exceptions_in_waiters_all_along_the_line(self) -> None:
        self.needs("verbs")
        with self.lock():
            threads = [self.waiter() for _ in range(6)]
            for struck in threads[::2]:
                assert struck.ident is not None
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(struck.ident), ctypes.py_object(ZeroDivisionError)
                )
        for number, thread in enumerate(threads):
            if number % 2:
                thread.result()
            else:
                try:
                    thread.result()
                except ZeroDivisionError:
                    pass
        self.becomes_free()

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

    def test_waiting_for_one_key_does_not_hold_up_others(self) -> None:
        self.needs("verbs")
        with self.lock():
            thread = self.waiter()
            for _ in range(20):
                with self.lock(self.new_key(), timeout=5):
                    pass
        thread.result()

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
