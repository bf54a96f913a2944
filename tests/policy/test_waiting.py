"""The wait queue of a process: in which order its waiters are served, and what a waiter leaves that is gone."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from django.test import override_settings

from angee_jobs.locks import LocalLockBackend, LockBackendError, clock, lock, lock_backends, waiting
from angee_jobs.locks.backends.base import OPERATION_SECONDS
from angee_jobs.locks.clock import now
from angee_jobs.locks.testing import ContractCase
from angee_jobs.locks.testing.contract.base import LONG, NOISE, Background
from tests.support.aio import waiting_here
from tests.support.servers import eventually
from tests.support.strategies import Local, PostgresTable, SqliteTable


class AnswersTooLate(LocalLockBackend):
    """Refuses the first try. The second one is granted, but its answer comes after the end of the wait."""

    tries = 0

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Any:
        self.tries += 1
        if self.tries == 1:
            return None
        grant = super().acquire(name, owner, ttl, holder, deadline)
        time.sleep(max(0.0, deadline - clock.now()))
        raise LockBackendError("no answer in time", name=name, uncertain=grant is not None)


def test_a_try_that_the_end_of_the_wait_cuts_off_leaves_no_hold() -> None:
    """Found by the model-based tests.

    It counted as refused and nobody took it back, so that the lock stayed taken until the end of its lease.
    """
    settings = {"default": {"BACKEND": f"{__name__}.AnswersTooLate"}}
    with override_settings(ANGEE_JOBS_LOCKS=settings):
        backend: Any = lock_backends.operations("default")
        assert not lock("cut off", ttl=600).acquire(timeout=0.1)
        assert backend.tries == 2
        eventually(lambda: not backend.is_held("cut off"), what="the late grant is taken back")


#: What a lost wake-up may cost, in seconds.
FALLBACK = 1.0


class WaitQueue(ContractCase):
    def waiter(self, timeout: float = 20, then: Callable[[], object] = int) -> Background:
        """A thread that waits for the lock, once it stands in the queue."""
        before = waiting_here(self.key.name, self.alias)

        def wait() -> float:
            with self.lock(timeout=timeout):
                then()
                return now()

        thread = self.in_background(wait)
        eventually(lambda: waiting_here(self.key.name, self.alias) == before + 1, what="it stands in the queue")
        return thread

    def test_without_a_timeout_the_lock_is_tried_once(self) -> None:
        with self.lock(), mock.patch.object(self.backend, "remaining", side_effect=AssertionError("it waits")):
            for refused in (self.lock(), self.lock(timeout=0)):
                with mock.patch.object(self.backend, "acquire", wraps=self.backend.acquire) as tried:
                    assert refused.acquire() is False
                    assert refused.acquire(timeout=0) is False
                assert tried.call_count == 2

    def test_waiters_of_one_process_are_served_in_order(self) -> None:
        order: list[int] = []
        with self.lock():
            threads = [self.waiter(then=functools.partial(order.append, number)) for number in range(8)]
        for thread in threads:
            thread.result()
        assert order == list(range(8))

    def test_a_newcomer_does_not_overtake_those_who_wait(self) -> None:
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
        assert order == ["first", "second", "newcomer"]

    def test_the_next_in_line_takes_over_when_the_first_gives_up(self) -> None:
        self.needs("leases")
        # A hold of nobody in this process, so that nothing here rings when it ends.
        owner, limit = "f" * 32, now() + OPERATION_SECONDS
        assert self.backend.acquire(self.key.name, owner, LONG, "{}", limit)
        first = self.in_background(self.lock(timeout=0.5).acquire)
        eventually(lambda: waiting_here(self.key.name, self.alias) == 1 or not first.is_alive())
        held = self.lock()
        second = self.in_background(held.acquire, 20)
        assert first.result() is False
        assert self.backend.release(self.key.name, owner, now() + OPERATION_SECONDS)
        assert second.result(2 * FALLBACK + NOISE) is True
        assert held.release()

    def test_one_waiter_asks_for_all(self) -> None:
        calls: list[int | None] = []

        def note(real: Any) -> Any:
            def operation(name: str, *args: Any) -> Any:
                if name == self.key.name:
                    calls.append(threading.get_ident())
                return real(name, *args)

            return operation

        with self.lock():
            threads = [self.waiter() for _ in range(8)]
            time.sleep(0.1)
            with contextlib.ExitStack() as stack:
                for operation in ("acquire", "acquire_next", "remaining"):
                    stack.enter_context(
                        mock.patch.object(self.backend, operation, note(getattr(self.backend, operation)))
                    )
                time.sleep(FALLBACK * 1.2)
            assert len(set(calls)) <= 1, "more than the head of the line asked the backend"
            assert len(calls) < 10, "the head of the line asks again and again"
        for thread in threads:
            thread.result()

    def test_a_release_in_this_process_wakes_a_waiter(self) -> None:

        def handover() -> float:
            held = self.lock()
            held.acquire()
            thread = self.waiter()
            released = now()
            held.release()
            return float(thread.result()) - released

        assert any(handover() < FALLBACK / 2 for _ in range(5))

    def test_a_waiter_that_was_turned_away_from_a_free_lock_asks_again_soon(self) -> None:
        """Somebody else's request was under way, and came to nothing: no release will be told."""
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
        assert turned_away.is_set()

    def test_s20_a_waiter_struck_by_an_exception_leaves_the_line(self) -> None:
        with self.lock():
            struck, behind = self.waiter(), self.waiter()
            assert struck.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(struck.ident), ctypes.py_object(ZeroDivisionError)
            )
            with pytest.raises(ZeroDivisionError):
                struck.result()
        behind.result()
        self.assert_free()

    def test_s20_exceptions_in_waiters_all_along_the_line(self) -> None:
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

    def test_waiting_for_one_key_does_not_hold_up_others(self) -> None:
        with self.lock():
            thread = self.waiter()
            for _ in range(20):
                with self.lock(self.new_key(), timeout=5):
                    pass
        thread.result()


class TestLocal(WaitQueue, unittest.TestCase):
    strategy = Local()


class TestSqlite(WaitQueue, unittest.TestCase):
    strategy = SqliteTable()


class TestPostgresTable(WaitQueue, unittest.TestCase):
    """Its waiters ask by an operation of their own, which may turn one away."""

    strategy = PostgresTable()

    @pytest.fixture(autouse=True)
    def _server(self, postgres):
        self.strategy.server = postgres
