"""Renewal: one backend in trouble costs no hold at another, and nothing is left with the renewal thread."""

import _thread
import contextlib
import functools
import gc
import threading
import time
import unittest
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from angee_jobs.locks import LocalLockBackend, LockBackendError, LockLostError, lock, process
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.clock import now
from angee_jobs.locks.lock import Lock
from angee_jobs.locks.renewal import renewer
from angee_jobs.locks.testing import ContractCase
from angee_jobs.locks.testing.contract.base import KEPT, NOISE, RENEWED
from tests.support.servers import eventually
from tests.support.strategies import Local, SqliteTable


class Hung(LocalLockBackend):
    """Renews when it is let go, or fails at the deadline."""

    def __init__(self):
        super().__init__()
        self.go_on, self.asked = threading.Event(), 0

    def extend(self, extensions, deadline):
        self.asked += 1
        if not self.go_on.wait(max(0.0, deadline - now())):
            raise LockBackendError("no answer in time")
        return super().extend(extensions, deadline)


def test_s07_a_backend_that_hangs_costs_no_hold_at_another(key):
    hung, well = Hung(), LocalLockBackend()
    with Lock(key, ttl=2.4, backend=well) as kept:
        lost = Lock(key, ttl=2.4, backend=hung)
        with pytest.raises(LockLostError), lost:
            eventually(lambda: lost.lost)
            eventually(lambda: hung.asked, what="it was asked to renew")
            time.sleep(0.5)  # without renewal the other would be over as well
            assert kept.held
            assert not Lock(key, backend=well).acquire()
    hung.go_on.set()


@pytest.mark.slow
def test_s06_a_backend_that_was_slow_once_has_no_thread_of_its_own_for_ever(key):
    hung = Hung()
    with Lock(key, ttl=4, backend=hung) as held:
        eventually(lambda: hung.asked > 1, what="the renewal is tried again")
        hung.go_on.set()
        time.sleep(1)
        assert held.held
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("angee-locks-renewal") == 1
        eventually(lambda: not any(thread.name == "angee-locks-renewal-own" for thread in threading.enumerate()))


def test_without_a_thread_of_its_own_a_slow_backend_is_renewed_all_the_same(key, monkeypatch):
    """The system may grant no more threads."""
    start, refused = process.start_thread, []

    def refuse(run, name):
        if name == "angee-locks-renewal-own":
            refused.append(run)
            return False
        return start(run, name)

    monkeypatch.setattr(process, "start_thread", refuse)
    backend = LocalLockBackend()
    renewer._slow.add(backend)
    with Lock(key, ttl=2.4, backend=backend) as held:
        ContractCase.is_renewed(held)
    assert refused
    assert backend not in renewer._busy


class Recovering(LocalLockBackend):
    """Does not answer at first. Later a call takes 0.4 s, and one that is given less fails."""

    def __init__(self):
        super().__init__()
        self.answers_from = now() + 2.8

    def extend(self, extensions, deadline):
        if now() < self.answers_from or deadline - now() < 0.4:
            time.sleep(max(0.0, deadline - now()))
            raise LockBackendError("no answer in time")
        time.sleep(0.4)
        return super().extend(extensions, deadline)


@pytest.mark.slow
def test_s09_holds_that_cannot_be_saved_do_not_take_the_others_with_them(key):
    """The time for a batch is not what is left to the most pressing hold of it."""
    backend = Recovering()
    holds = [Lock(f"{key}-{number}", ttl=3 if number < 9 else 4, backend=backend) for number in range(12)]
    for each in holds:
        each.__enter__()
        time.sleep(0.15)
    ends = now() + 4.0  # of every lease that is not renewed
    # When the backend answers, the first have 0.2 s left, the last more than 2 s.
    time.sleep(ends + 0.1 - now())
    kept = [each.held for each in holds]
    for each in holds:
        with contextlib.suppress(LockLostError):
            each.__exit__(None, None, None)
    assert all(kept[9:]), kept


def test_no_hold_is_left_with_the_renewal_thread(key):
    before = len(renewer.holds)
    for _ in range(20):
        with lock(key, timeout=5, backend="local"):
            pass
        assert lock(key, backend="local").acquire()  # and is dropped at once
    eventually(lambda: len(renewer.holds) <= before)


class Leases(ContractCase):
    """What keeps leases alive, and how much of it there is."""

    requires = ("leases",)

    def _extend(self, change: Any) -> Any:
        """Let ``change(real, extensions, deadline)`` stand for the backend's extend()."""
        real = self.backend.extend
        return mock.patch.object(self.backend, "extend", functools.partial(change, real))

    def test_s08_an_error_of_one_hold_leaves_the_others_renewed(self) -> None:
        bad = self.new_key()

        def fail_for_one(real: Any, extensions: Sequence[Extension], deadline: float) -> Any:
            if any(each.name == bad.name for each in extensions):
                raise ValueError("a bug that concerns one hold")
            return real(extensions, deadline)

        keys = [self.new_key() for _ in range(3)]
        with self._extend(fail_for_one), contextlib.ExitStack() as stack:
            good = [stack.enter_context(self.lock(keys[0], ttl=RENEWED))]
            unlucky = self.lock(bad, ttl=RENEWED)
            with pytest.raises(LockLostError), unlucky:
                good += [stack.enter_context(self.lock(key, ttl=RENEWED)) for key in keys[1:]]
                eventually(lambda: unlucky.lost, RENEWED + NOISE, "the loss is known")
                time.sleep(0.3)  # all were taken at about the same time: what was not renewed is over by now
                for each in good:
                    assert each.held
                    self.assert_held(each.key)

    def test_nothing_renews_after_the_block(self) -> None:
        renewed: list[str] = []

        def note(real: Any, extensions: Sequence[Extension], deadline: float) -> Any:
            renewed.extend(each.name for each in extensions)
            return real(extensions, deadline)

        with self._extend(note):
            with self.lock(ttl=KEPT):
                pass
            with pytest.raises(ZeroDivisionError), self.lock(ttl=KEPT):
                raise ZeroDivisionError
            time.sleep(KEPT / 2)
        assert self.key.name not in renewed

    @pytest.mark.slow
    def test_s46_finalizers_at_any_moment_block_nobody(self) -> None:
        def work() -> None:
            for number in range(15):
                key = self.new_key()
                held = self.lock(key, ttl=5)
                held.acquire()
                cycle: list[Any] = [held]
                cycle.append(cycle)
                del held, cycle
                with self.lock(self.new_key(), ttl=5, timeout=5):
                    if number % 10 == 0:
                        gc.collect()

        thresholds = gc.get_threshold()
        gc.set_threshold(20, 2, 2)
        try:
            for thread in [self.in_background(work) for _ in range(3)]:
                thread.result(40)
        finally:
            gc.set_threshold(*thresholds)
        gc.collect()

    def test_one_thread_renews_everything(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                held = stack.enter_context(self.lock(self.new_key(), ttl=RENEWED))
            threads = {thread.ident for thread in threading.enumerate()}
            self.is_renewed(held)
            # A backend that was slow, as on a busy machine, has one more until it has been prompt again.
            eventually(lambda: {thread.ident for thread in threading.enumerate()} <= threads, what="no other threads")

    def test_renewals_are_batched(self) -> None:
        sizes: list[int] = []

        def note(real: Any, extensions: Sequence[Extension], deadline: float) -> Any:
            sizes.append(len(extensions))
            return real(extensions, deadline)

        with self._extend(note), contextlib.ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(self.lock(self.new_key(), ttl=RENEWED))
            eventually(lambda: sum(sizes) >= 30, what="all are renewed")
        assert len(sizes) < 15

    def test_a_short_hold_has_no_thread_and_no_renewal(self) -> None:
        with self.lock(self.new_key()):
            pass  # what is started once has started
        with (
            mock.patch.object(threading.Thread, "start", side_effect=AssertionError("a thread was started")),
            mock.patch.object(_thread, "start_new_thread", side_effect=AssertionError("a thread was started")),
            mock.patch.object(self.backend, "extend", side_effect=AssertionError("it was renewed")),
        ):
            for _ in range(10):
                with self.lock():
                    pass


class TestLocal(Leases, unittest.TestCase):
    strategy = Local()


class TestSqlite(Leases, unittest.TestCase):
    strategy = SqliteTable()
