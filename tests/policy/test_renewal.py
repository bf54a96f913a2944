"""Renewal: one backend in trouble costs no hold at another, and nothing is left with the renewal thread."""

import contextlib
import threading
import time

import pytest

from angee_jobs.locks import LocalLockBackend, LockBackendError, LockLostError, lock
from angee_jobs.locks.clock import now
from angee_jobs.locks.lock import Lock
from angee_jobs.locks.renewal import renewer
from angee_jobs.locks.testing import ContractCase
from tests.support.servers import eventually


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


def test_s06_a_backend_that_was_slow_once_has_no_thread_of_its_own_for_ever(key):
    hung = Hung()
    with Lock(key, ttl=4, backend=hung) as held:
        eventually(lambda: hung.asked > 1, what="the renewal is tried again")
        hung.go_on.set()
        time.sleep(1)
        assert held.held
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("angee-locks-renewal") == 1
        eventually(lambda: not any(thread.name == "angee-locks-renewal-slow" for thread in threading.enumerate()))


def test_without_a_thread_of_its_own_a_slow_backend_is_renewed_all_the_same(key, monkeypatch):
    """The system may grant no more threads."""
    start, refused = threading.Thread.start, []

    def refuse(thread):
        if thread.name == "angee-locks-renewal-slow":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
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
