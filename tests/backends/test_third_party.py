"""Backends that are not ours: with the least that the protocol asks for, and with the contract suite run by them."""

import threading
import unittest
from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.test import override_settings

from angee_jobs.locks import (
    LocalLockBackend,
    LockBackend,
    LockBackendError,
    LockHandle,
    LockLostError,
    LockNotAcquiredError,
    get_lock_backend,
    held_locks,
    lock,
    lock_info,
    locked,
    record_lock_key,
    task_lock,
    task_lock_is_held,
    task_locks_are_cross_process,
    testing,
)
from angee_jobs.locks.keys import lock_name
from angee_jobs.locks.testing.contract.base import Background
from tests.support.servers import eventually


class Handle:
    def __init__(self, backend, name):
        self.backend, self.name = backend, name

    def release(self):
        if self.backend.fails:
            raise self.backend.fails
        return self.backend.end(self.name)


class Minimal:
    """Only what the protocol asks for, and not even `cross_process`."""

    def __init__(self):
        self.held, self.condition = set(), threading.Condition()
        self.timeouts, self.fails, self.answer = [], None, None

    def try_acquire(self, key, *, timeout=None):
        self.timeouts.append(timeout)
        if self.fails:
            raise self.fails
        name = lock_name(key)
        with self.condition:
            seconds = 0 if timeout is None else timeout.total_seconds()
            if not self.condition.wait_for(lambda: name not in self.held, min(seconds, threading.TIMEOUT_MAX)):
                return None
            self.held.add(name)
        return Handle(self, name)

    def is_held(self, key):
        return lock_name(key) in self.held

    def end(self, name):
        with self.condition:
            self.held.discard(name)
            self.condition.notify_all()
        return self.answer


class Shared(Minimal):
    cross_process = True


class NotShared(Minimal):
    cross_process = False


@pytest.fixture
def minimal():
    setting = {
        "default": {"BACKEND": f"{__name__}.Minimal"},
        "shared": {"BACKEND": f"{__name__}.Shared"},
        "not_shared": {"BACKEND": f"{__name__}.NotShared"},
    }
    with override_settings(ANGEE_JOBS_LOCKS=setting):
        backend = get_lock_backend()
        assert isinstance(backend, Minimal), "the instance itself, not something around it"
        yield backend
        eventually(lambda: backend.held == set())


def test_the_protocols_are_told_at_run_time(minimal):
    assert isinstance(get_lock_backend("shared"), LockBackend)
    assert isinstance(get_lock_backend("shared").try_acquire("x"), LockHandle)
    get_lock_backend("shared").end(lock_name("x"))


def test_task_lock_says_whether_it_got_the_lock(minimal):
    key = record_lock_key("messaging.Channel", 42, "sync")
    with task_lock(key) as acquired:
        assert acquired is True
        assert task_lock_is_held(key) is True
        with task_lock(key) as again:
            assert again is False
        assert task_lock_is_held(key) is True
    assert task_lock_is_held(key) is False


def test_lock_and_locked_work_too(minimal):
    with lock("x") as held:
        assert held.held
        held.check()
        assert held.fencing_token is None
        with pytest.raises(LockNotAcquiredError) as caught, lock("x"):
            pytest.fail("two holders")
        assert caught.value.holder is None
        assert not lock("x").acquire()

    @locked("x", on_refused="skip")
    def work():
        return "done"

    assert work() == "done"
    with lock("x"):
        assert work() is None


def test_who_does_not_say_that_it_crosses_processes_does_not(minimal):
    assert task_locks_are_cross_process() is False
    assert task_locks_are_cross_process(backend="shared") is True
    assert task_locks_are_cross_process(backend="not_shared") is False


def test_the_backend_waits_itself_and_gets_a_timedelta(minimal):
    with lock("x"):
        with task_lock("x", timeout=0.2) as acquired:
            assert acquired is False
        waiting = Background(lock("x", timeout=10).acquire)
    assert waiting.result() is True
    minimal.end(lock_name("x"))
    with lock("x", timeout=float("inf")):
        pass
    assert minimal.timeouts[:3] == [None, timedelta(seconds=0.2), timedelta(seconds=10)]
    assert minimal.timeouts[3] > timedelta(days=3650)


def test_the_exception_of_the_body_stays_and_the_lock_comes_free(minimal):
    for error in (ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), task_lock("x"):
            raise error
        assert not minimal.held


def test_a_handle_that_says_false_was_lost(minimal):
    minimal.answer = False
    with pytest.raises(LockLostError), lock("x"):
        pass
    minimal.answer = True
    with lock("x"):
        pass


def test_a_backend_that_fails_is_no_refusal(minimal):
    minimal.fails = LockBackendError("away")
    with pytest.raises(LockBackendError), task_lock("x"):
        pytest.fail("failed open")
    minimal.fails = None


def test_nothing_is_told_of_a_holder_that_nobody_knows(minimal):
    with lock("x"):
        for ask in (lambda: lock_info("x"), lambda: list(held_locks())):
            with pytest.raises(LockBackendError, match="'default'"):
                ask()


def test_its_locks_too_are_held_until_the_commit(minimal):
    with transaction.atomic():
        with task_lock("x") as acquired:
            assert acquired
        assert minimal.is_held("x")
        with task_lock("x") as again:
            assert again
    assert not minimal.is_held("x")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        with task_lock("x"):
            raise ZeroDivisionError
    eventually(lambda: not minimal.is_held("x"))


def test_a_guard_needs_fencing_tokens(minimal):
    with lock("x") as held, transaction.atomic(), pytest.raises(LockBackendError, match="fencing"), held.guard():
        pytest.fail("there is nothing to tell a stale holder by")
    connections["default"].close()


# The contract suite, as somebody else's backend runs it


class Broken(LocalLockBackend):
    """Releases whatever it is told to."""

    def release(self, name, owner, deadline):
        with self._mutex:
            return self._leases.pop(name, None) is not None


class OnePart(testing.Strategy):
    alias = "default"
    lacks = {
        "processes": "it lives in one process",
        "hanging": "there is no server",
        "unreachable": "there is no server",
        "break_connections": "there is no server",
    }


def run_under_unittest(path, *names):
    class Case(testing.LockContract, unittest.TestCase):
        strategy = OnePart()

    result = unittest.TestResult()
    with override_settings(ANGEE_JOBS_LOCKS={"default": {"BACKEND": path}}):
        unittest.TestSuite(Case(name) for name in names).run(result)
    return result


def test_the_contract_runs_under_unittest_and_says_what_it_skips():
    result = run_under_unittest(
        "angee_jobs.locks.LocalLockBackend",
        "test_a_free_lock_is_granted_and_comes_free_again",
        "test_a_stranger_neither_releases_nor_extends",
        "test_processes_exclude_each_other",
    )
    assert result.testsRun == 3
    assert result.wasSuccessful()
    [(_, reason)] = result.skipped
    assert "it lives in one process" in reason


def test_the_contract_finds_a_backend_that_does_not_check_the_owner():
    result = run_under_unittest(f"{__name__}.Broken", "test_a_stranger_neither_releases_nor_extends")
    assert len(result.failures) == 1


def test_a_hook_that_is_neither_written_nor_explained_is_an_error():
    result = run_under_unittest("angee_jobs.locks.LocalLockBackend", "test_s04_up_over_an_emptied_storage")
    [(_, text)] = result.errors
    assert "OnePart has no empty()" in text


class MinimalStrategy(testing.Strategy):
    alias = "default"
    lacks = dict.fromkeys(testing.CAPABILITIES, "a backend with try_acquire() and is_held() has no more")


@pytest.mark.usefixtures("minimal")
class TestMinimal(testing.LockContract, unittest.TestCase):
    strategy = MinimalStrategy()
