"""What ``angee_jobs.locks.testing`` gives to the test suites of others: local locks, another holder, a loss."""

import asyncio
import os
import subprocess
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from angee_jobs.locks import (
    LocalLockBackend,
    LockLostError,
    LockNotAcquiredError,
    get_lock_backend,
    held_locks,
    lock,
    lock_acquired,
    lock_info,
    lock_lost,
    lock_released,
    locked,
    task_lock,
    task_lock_is_held,
)
from angee_jobs.locks.renewal import renewer
from angee_jobs.locks.testing import assert_locked, held_by_other, local_locks, lose
from tests.support.procs import ROOT
from tests.support.servers import missing_packages, require

INNER = Path(__file__).parent / "inner_doubles"
KEY = "doubles"


class TestHeldByOther:
    def test_everybody_is_refused_until_it_ends(self, alias):
        with held_by_other(KEY, backend=alias):
            with task_lock(KEY, backend=alias) as acquired:
                assert acquired is False
            with pytest.raises(LockNotAcquiredError), lock(KEY, backend=alias):
                pass
            assert task_lock_is_held(KEY, backend=alias)
        with lock(KEY, backend=alias):
            pass

    def test_a_waiter_gets_it_when_it_is_released(self, alias):
        with held_by_other(KEY, backend=alias) as other:
            threading.Timer(0.1, other.release).start()
            with lock(KEY, timeout=10, backend=alias):
                pass
        assert not task_lock_is_held(KEY, backend=alias)

    def test_no_signal_is_sent_of_it(self):
        heard = []

        def hear(key, **kwargs):
            if key.parts == (KEY,):  # not of what other tests have left
                heard.append(kwargs)

        signals = (lock_acquired, lock_released)
        for signal in signals:
            signal.connect(hear)
        with held_by_other(KEY):
            pass
        for signal in signals:
            signal.disconnect(hear)
        assert heard == []

    def test_the_refusal_names_another_host(self):
        with held_by_other(KEY), pytest.raises(LockNotAcquiredError) as refused, lock(KEY):
            pass
        assert refused.value.holder.holder.host == "another-host"

    def test_of_a_lock_that_is_held(self, alias):
        with lock(KEY, backend=alias), pytest.raises(AssertionError, match="held already"):
            held_by_other(KEY, backend=alias).__enter__()

    def test_around_coroutines(self):
        async def body():
            with held_by_other(KEY):
                async with task_lock(KEY) as acquired:
                    return acquired

        with local_locks():
            assert asyncio.run(body()) is False


class TestLose:
    def test_the_block_ends_in_a_loss_and_others_can_have_the_lock(self, alias):
        with pytest.raises(LockLostError), lock(KEY, backend=alias) as held:
            lose(held)
            assert held.lost
            with pytest.raises(LockLostError):
                held.check()
            with lock(KEY, backend=alias):
                pass

    def test_by_key_where_there_is_no_lock_object(self, alias):
        @locked(KEY, backend=alias)
        def work():
            lose(KEY, backend=alias)

        with pytest.raises(LockLostError):
            work()
        with pytest.raises(LockLostError), task_lock(KEY, backend=alias):
            lose(KEY, backend=alias)

    def test_receivers_have_been_called_when_it_returns(self):
        heard = []

        def hear(key, reason, **kwargs):
            if key.parts == (KEY,):  # not of what other tests have left
                heard.append((key.name, reason))

        lock_lost.connect(hear)
        held = lock(KEY)
        held.acquire()
        lose(held)
        lock_lost.disconnect(hear)
        assert heard == [("angee:name:doubles", "lose() played its loss")]

    def test_cancels_a_coroutine_that_asked_for_it(self):
        async def body():
            async with lock(KEY, cancel_on_loss=True) as held:
                await asyncio.to_thread(lose, held)
                await asyncio.sleep(20)

        with pytest.raises(LockLostError):
            asyncio.run(body())

    def test_of_a_lock_that_is_not_held(self):
        with pytest.raises(AssertionError, match="angee:name:doubles is not held"):
            lose(KEY)
        with pytest.raises(AssertionError, match="angee:name:doubles is not held"):
            lose(lock(KEY))


class TestAssertLocked:
    def test_passes_for_a_lock_that_was_taken(self, alias):
        with assert_locked(KEY, backend=alias), lock(KEY, backend=alias):
            pass

    def test_fails_otherwise_and_says_what_was_taken(self):
        with pytest.raises(AssertionError, match=r"angee:name:doubles .*'local' was not taken; taken was no lock"):
            with assert_locked(KEY, backend="local"):
                pass
        with pytest.raises(AssertionError, match="taken was angee:name:another of 'local'"):
            with assert_locked(KEY, backend="local"), lock("another", backend="local"):
                pass

    def test_a_refusal_is_no_lock(self):
        with held_by_other(KEY), pytest.raises(AssertionError, match="was not taken"):
            with assert_locked(KEY), task_lock(KEY):
                pass

    def test_the_error_of_the_body_stays(self):
        with pytest.raises(ZeroDivisionError), assert_locked(KEY):
            raise ZeroDivisionError


class TestLocalLocks:
    def test_what_is_held_outside_is_not_held_inside_and_the_other_way_round(self):
        with lock(KEY):
            with local_locks():
                with lock(KEY):
                    pass
            assert task_lock_is_held(KEY)

    def test_what_is_left_over_is_released_and_nobody_is_told(self):
        heard = []

        def hear(key, **kwargs):
            if key.parts == (KEY,):  # not of what other tests have left
                heard.append(kwargs)

        lock_lost.connect(hear)
        for _ in range(2):
            with local_locks():
                left = lock(KEY)
                assert left.acquire()
            assert not left.held
            assert not left.lost
        assert left._hold not in renewer.holds
        lock_lost.disconnect(hear)
        assert heard == []

    def test_without_the_setting(self):
        with override_settings(ANGEE_JOBS_LOCKS=None), local_locks():
            assert isinstance(get_lock_backend(), LocalLockBackend)

    def test_session_locks_stay_session_locks(self):
        postgres = "angee_jobs.locks.PostgresAdvisoryLockBackend"
        with override_settings(ANGEE_JOBS_LOCKS={"default": {"BACKEND": postgres}}), local_locks():
            with lock(KEY, ttl=0.05, auto_extend=False) as held:
                threading.Event().wait(0.1)
                assert held.extend()
                assert lock_info(KEY).expires_at is None
                assert [info.name for info in held_locks()] == [held.name]
                with pytest.raises(ImproperlyConfigured):
                    held.detach()
                with task_lock(KEY, timeout=0.1) as acquired:
                    assert not acquired

    @pytest.mark.parametrize("backend", ["PostgresAdvisoryLockBackend", "TableLockBackend"])
    def test_places_shared_holds_and_several_keys(self, backend):
        with override_settings(ANGEE_JOBS_LOCKS={"default": {"BACKEND": f"angee_jobs.locks.{backend}"}}), local_locks():
            with lock(KEY, slots=2) as first, lock(KEY, slots=2) as second, lock(KEY, shared=True):
                assert (first.slot, second.slot) == (0, 1)
                assert sorted(info.place for info in held_locks(key=KEY)) == ["place 1 of 2", "place 2 of 2", "shared"]
                for options in ({"slots": 2}, {}):
                    with task_lock(KEY, **options) as acquired:
                        assert not acquired
            with lock(["b", "a"]) as both, task_lock(["c", "b"]) as acquired:
                assert list(both.fencing_tokens) == ["angee:name:a", "angee:name:b"]
                assert not acquired and not task_lock_is_held("c")

    def test_a_wait_is_over_at_the_release(self):
        with local_locks(), held_by_other(KEY) as other:
            threading.Timer(0.1, other.release).start()
            with task_lock(KEY, timeout=10) as acquired:
                assert acquired


def run(*command, **environment):
    environment = os.environ | environment | {"PYTHONPATH": os.pathsep.join([str(INNER), str(ROOT)])}
    environment["DJANGO_SETTINGS_MODULE"] = "doubles_settings"
    done = subprocess.run(
        [sys.executable, *command], cwd=INNER, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("--parallel", "2")], ids=["one process", "parallel"])
def test_under_manage_py_test(options):
    assert "Ran 16 tests" in run("-m", "django", "test", "billing.tests", *options)


def run_pytest(*options, setup=("-p", "doubles_setup", "-p", "no:django")):
    plugins = () if entry_points(group="pytest11", name="angee_jobs") else ("-p", "angee_jobs.pytest_plugin")
    alone = ["-c", os.devnull, "--rootdir", INNER, "--confcutdir", INNER, "-p", "no:cacheprovider"]
    return run("-m", "pytest", "-q", "--strict-markers", *setup, *plugins, *alone, *options)


def test_the_pytest_plugin_gives_local_locks_to_who_asks():
    assert "4 passed" in run_pytest("asked_tests.py")


def test_the_pytest_plugin_gives_local_locks_to_all_tests():
    assert "14 passed" in run_pytest("-o", "angee_jobs_local_locks=true", "billing_tests.py")


def test_the_pytest_plugin_with_xdist():
    require(missing_packages("xdist"))
    assert "14 passed" in run_pytest("-o", "angee_jobs_local_locks=true", "-n", "2", "billing_tests.py")


def test_the_pytest_plugin_beside_pytest_django():
    require(missing_packages("pytest_django"))
    setup = ("--ds", "doubles_settings")
    assert "16 passed" in run_pytest("billing/tests.py", setup=setup)
    assert "4 passed" in run_pytest("asked_tests.py", setup=setup)
