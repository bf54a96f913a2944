"""Scenario 31: what a forked or spawned child inherits of locks is a copy that does nothing."""

import asyncio
import concurrent.futures
import gc
import importlib
import multiprocessing
import os
import signal
import threading
import time

import pytest
from django.db import connections, transaction
from django.test import override_settings

from angee_jobs.locks import LocalLockBackend, LockLostError, lock, lock_backends, process, task_lock, task_lock_is_held
from angee_jobs.locks.renewal import renewer
from tests.support.aio import is_free, make, new_key, nothing_left, renewed, run
from tests.support.forks import Forked, leave_as_a_program_does
from tests.support.servers import eventually

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_a_fork_waits_for_an_import_to_end():
    """Else the child would have the lock of a half-imported module, and nobody who ever releases it."""
    begun, imported = threading.Event(), []

    def load():
        with process.importing:
            begun.set()
            time.sleep(0.3)
            imported.append("all of it")

    def free():
        """For another thread; the one that forked would get it again in any case."""
        with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:
            try:
                return elsewhere.submit(process.importing.acquire, timeout=1).result(10)
            finally:
                elsewhere.submit(process.importing.release).result(10)

    loader = threading.Thread(target=load)
    loader.start()
    assert begun.wait(10)
    assert Forked(lambda: (list(imported), free())).result() == (["all of it"], True)
    loader.join(10)
    assert free()


class SlowToMake(LocalLockBackend):
    begun, made = threading.Event(), []

    def __init__(self):
        self.begun.set()
        time.sleep(0.3)
        super().__init__()
        self.made.append("made")


@override_settings(ANGEE_JOBS_LOCKS={"default": {"BACKEND": "tests.policy.test_fork.SlowToMake"}})
def test_a_fork_waits_for_a_backend_to_be_made():
    """To make one may import its class, and what that needs."""
    maker = threading.Thread(target=lock_backends.__getitem__, args=["default"])
    maker.start()
    backend = importlib.import_module("tests.policy.test_fork").SlowToMake
    assert backend.begun.wait(10)
    assert Forked(lambda: list(backend.made)).result() == ["made"]
    maker.join(10)


def test_a_fork_inside_an_import_goes_on():
    with process.importing:
        assert Forked(lambda: process.importing.acquire(timeout=1)).result() is True


def crosses(alias):
    return lock_backends[alias].cross_process


def look(held, key, other, alias):
    """What a child finds of its parent's hold, and that it can take locks of its own at once."""
    seen = {
        "held": held.held,
        "lost": held.lost,
        "released": held.release(),
        "extended": held.extend(),
        "renewed": [hold.name for hold in renewer.holds],
        "taken from the parent": is_free(key, alias),
    }
    try:
        held.check()
    except LockLostError:
        seen["check"] = "not held here"
    with make(other, alias, ttl=2.25, timeout=5) as own:
        renewed(own)
        seen["own lock"] = own.held
        own.check()
    return seen


@pytest.mark.parametrize("exit_", [lambda: os._exit(0), leave_as_a_program_does], ids=["_exit", "sys.exit"])
def test_fork_inside_a_block(alias, exit_):
    key, other = new_key(), new_key()
    with make(key, alias, ttl=2.25) as held:
        seen = Forked(lambda: look(held, key, other, alias), exit_).result()
        assert seen == {
            "held": False,
            "lost": False,
            "released": False,
            "extended": False,
            "renewed": [],
            "taken from the parent": not crosses(alias),
            "check": "not held here",
            "own lock": True,
        }
        for _ in range(2):
            renewed(held)
        held.check()
        assert not is_free(key, alias)
    nothing_left(key, alias)
    nothing_left(other, alias)


def test_child_leaves_the_parents_block(alias):
    """Code that forks in the middle of a block and goes on in both processes."""
    key = new_key()
    held = make(key, alias)
    block = task_lock(key, backend=alias)

    def leave():
        block.__exit__(None, None, None)
        gc.collect()
        return "left"

    assert block.__enter__()
    assert Forked(leave).result() == "left"
    assert not is_free(key, alias)
    assert not held.acquire()
    block.__exit__(None, None, None)
    nothing_left(key, alias)


def test_killed_child_frees_nothing(alias):
    key = new_key()
    with make(key, alias) as held:
        child = Forked(lambda: time.sleep(60))
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        os.close(child._reader)
        assert held.held
        assert not is_free(key, alias)
        assert held.extend()
    nothing_left(key, alias)


def test_fork_of_a_fork(alias):
    key = new_key()

    def grandchild(mine, own):
        return mine.held, own.held, own.release(), is_free(f"{key}-third", alias)

    def child():
        with make(f"{key}-second", alias) as own:
            inner = Forked(lambda: grandchild(held, own)).result()
            return inner, own.held, own.extend()

    with make(key, alias) as held:
        assert Forked(child).result() == ((False, False, False, True), True, True)
        assert held.held
    nothing_left(key, alias)
    nothing_left(f"{key}-second", alias)


def test_fork_while_threads_are_in_the_middle_of_everything(alias):
    """Whatever internal lock a thread held at the fork, the child does not wait for it."""
    key = new_key()
    stop = threading.Event()
    troubles = []

    def busy(number):
        try:
            while not stop.is_set():
                with make(key, alias, timeout=20):
                    pass
                make(f"{key}-{number}", alias).acquire(0)
        except BaseException as error:
            troubles.append(error)

    with make(key, alias):  # a thread in the middle of an import is the interpreter's to lock
        assert not make(key, alias).acquire(1.5)
    threads = [threading.Thread(target=busy, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(8):

            def child(number=number):
                with make(f"{key}-child-{number}", alias, timeout=10):
                    pass
                if crosses(alias):
                    with make(key, alias, timeout=20):
                        pass
                return run(in_a_loop(f"{key}-child-{number}", alias))

            assert Forked(child).result(30) == "done"
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not troubles
    assert not [thread for thread in threads if thread.is_alive()]
    nothing_left(key, alias)


async def in_a_loop(key, alias):
    async with make(key, alias, timeout=10):
        return "done"


def test_fork_inside_a_coroutine(alias):
    key = new_key()

    def child(held):
        return held.held, run(in_a_loop(f"{key}-own", alias))

    async def main():
        async with make(key, alias) as held:
            assert await held.aextend()  # so that there are threads to be without
            assert Forked(lambda: child(held)).result() == (False, "done")
            assert held.held
            assert await held.aextend()

    run(main())
    nothing_left(key, alias)


def test_fork_inside_a_transaction(alias):
    """The hold is the parent's transaction's: the child's copy of it ends nothing."""
    key = new_key()

    def child():
        connections["default"].run_on_commit.clear()  # as if it were rolled back: finalizers run
        gc.collect()
        eventually(lambda: not renewer.holds)
        return is_free(f"{key}-own", alias)

    with transaction.atomic():
        with make(key, alias):
            pass
        assert Forked(child).result()
        assert not is_free(key, alias)
    nothing_left(key, alias)


def _take(key, alias):
    """For processes that multiprocessing starts."""
    from angee_jobs.locks import lock

    tried = lock(key, backend=alias)
    got = tried.acquire()
    with lock(f"{key}-{os.getpid()}", backend=alias, ttl=5, timeout=5) as own:
        return got, own.held


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_process_pools(alias, method):
    if method != "fork" and alias != "sqlite":
        pytest.skip("a process that starts from nothing inherits nothing, whatever the backend")
    key = new_key()
    context = multiprocessing.get_context(method)
    with make(key, alias) as held:
        with concurrent.futures.ProcessPoolExecutor(2, context, initializer=_django) as pool:
            answers = [each.result(30) for each in [pool.submit(_take, key, alias) for _ in range(4)]]
        assert all(own for _, own in answers)
        if crosses(alias):
            assert not any(got for got, _ in answers)
        held.check()
        assert not is_free(key, alias)
    nothing_left(key, alias)


def _django():
    import django

    django.setup()


def test_exclusion_between_parent_and_children(alias, server_dir):
    """Scenario 16 with forked processes and threads in each."""
    if not crosses(alias):
        pytest.skip("excludes inside one process only")
    key = new_key()
    path = server_dir / "count"
    path.write_text("0")

    def add(times):
        for _ in range(times):
            with make(key, alias, timeout=30):
                number = int(path.read_text())
                time.sleep(0.001)
                path.write_text(str(number + 1))

    def many():
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for each in [pool.submit(add, 4) for _ in range(3)]:
                each.result(40)
        return "done"

    children = [Forked(many) for _ in range(3)]
    many()
    assert [child.result(40) for child in children] == ["done"] * 3
    assert path.read_text() == str(4 * 3 * 4)
    nothing_left(key, alias)


def test_waiter_in_a_child_gets_the_parents_lock(alias):
    if not crosses(alias):
        pytest.skip("excludes inside one process only")
    key = new_key()

    def wait():
        with make(key, alias, timeout=20):
            return task_lock_is_held(key, backend=alias)

    with make(key, alias):
        child = Forked(wait)
        time.sleep(0.1)
    assert child.result() is True
    nothing_left(key, alias)


def test_a_lock_object_made_before_the_fork_serves_both(alias):
    key = new_key()
    mine = lock(key, backend=alias, ttl=20)
    with mine:
        first = mine.fencing_token

    def child():
        with mine:
            return mine.fencing_token

    second = Forked(child).result()
    with mine:
        if crosses(alias):
            assert first < second < mine.fencing_token
    nothing_left(key, alias)


def test_the_default_loop_of_a_child(alias):
    """asyncio.run in the child of a process that had a loop with waiting coroutines."""
    key = new_key()

    async def main():
        async with make(key, alias):
            waiting = [asyncio.create_task(make(key, alias).aacquire(20)) for _ in range(5)]
            await asyncio.sleep(0.05)
            assert Forked(lambda: run(in_a_loop(f"{key}-own", alias))).result() == "done"
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    run(main())
    nothing_left(key, alias)
