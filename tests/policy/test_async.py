"""Coroutines: the same promises, no thread per waiter, nothing blocking on the loop."""

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from angee_jobs.locks import (
    LockLostError,
    LockNotAcquiredError,
    force_release,
    lock_info,
    locked,
    task_lock,
)
from tests.support.aio import DEADLINE, is_free, lock_threads, make, new_key, nothing_left, run, until, waiters


def test_block_and_refusal(alias):
    key = new_key()

    async def main():
        async with make(key, alias) as held:
            assert held.held
            assert held.fencing_token > 0
            assert (await held.ainfo()).owner_id == held.owner_id
            assert await held.aextend(30)
            with pytest.raises(LockNotAcquiredError):
                async with make(key, alias):
                    pass
            async with task_lock(key, backend=alias) as acquired:
                assert acquired is False
            assert not await make(key, alias).aacquire()
            assert not await make(key, alias).aacquire(0.5)
        assert not held.held
        again = make(key, alias)
        assert await again.aacquire()
        assert again.fencing_token > held.fencing_token
        assert await again.arelease()
        assert not await again.arelease()

    run(main())
    nothing_left(key, alias)


def test_locked_on_async_def(alias):
    key = new_key()
    inside = []

    @locked(lambda number: key, backend=alias, on_refused="skip")
    async def body(number):
        inside.append(number)
        await until(lambda: len(results) == 2)
        return number

    results = []

    async def one(number):
        results.append(await body(number))

    async def main():
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(one(number))

    run(main())
    assert len(inside) == 1
    assert sorted(results, key=str) == sorted([inside[0], None, None], key=str)
    nothing_left(key, alias)


@pytest.mark.slow
@pytest.mark.parametrize("executor_size", [1, 40])
def test_a_thousand_coroutines_all_get_their_turn(alias, executor_size, as_in_production):
    if executor_size > 1 and alias != "local":
        pytest.skip("whatever the size: the loop's executor is not used")
    key = new_key()
    count = 1000
    most_threads = inside = done = 0

    async def one():
        nonlocal inside, done, most_threads
        async with make(key, alias, timeout=DEADLINE):
            inside += 1
            assert inside == 1
            most_threads = max(most_threads, threading.active_count())
            await asyncio.sleep(0)
            inside -= 1
            done += 1

    async def main():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(executor_size))
        # The application's own work fills the loop's executor, and ends only when the locks have had their turn.
        full = [asyncio.get_running_loop().run_in_executor(None, go_on.wait, DEADLINE) for _ in range(executor_size)]
        before = threading.active_count()
        try:
            async with asyncio.TaskGroup() as group:
                async with make(key, alias):
                    for _ in range(count):
                        group.create_task(one())
                    await until(lambda: waiters(key, alias) == count, 30)
                    assert threading.active_count() <= before + 8, lock_threads()
        finally:
            go_on.set()
        await asyncio.gather(*full)
        return before

    go_on = threading.Event()
    before = run(main())
    assert done == count
    assert most_threads <= before + 8, lock_threads()
    nothing_left(key, alias)


def test_arrival_order(alias):
    key = new_key()
    order = []

    async def one(number):
        async with make(key, alias, timeout=DEADLINE):
            order.append(number)

    async def main():
        async with asyncio.TaskGroup() as group:
            async with make(key, alias):
                for number in range(50):
                    group.create_task(one(number))
                    await until(lambda number=number: waiters(key, alias) == number + 1)

    run(main())
    assert order == list(range(50))


def test_timeout_is_the_total_wait(alias):
    key = new_key()

    async def main():
        async with make(key, alias):
            started = time.monotonic()
            assert not await make(key, alias).aacquire(1.5)
            assert 1.5 <= time.monotonic() - started < 5

    run(main())


def test_several_loops_and_threads_at_once(alias):
    key = new_key()
    total = 0

    async def one():
        nonlocal total
        async with make(key, alias, timeout=DEADLINE):
            seen = total
            await asyncio.sleep(0)
            total = seen + 1

    async def main():
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(one())

    def plain():
        nonlocal total
        for _ in range(10):
            with make(key, alias, timeout=DEADLINE):
                seen = total
                time.sleep(0)
                total = seen + 1

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(run, main()) for _ in range(3)] + [pool.submit(plain) for _ in range(3)]
        for job in jobs:
            job.result(DEADLINE)
    assert total == 3 * 20 + 3 * 10
    nothing_left(key, alias)


def test_coroutine_waits_for_a_thread_and_a_thread_for_a_coroutine(alias):
    key = new_key()
    release, released = threading.Event(), threading.Event()
    entered = threading.Event()

    def thread():
        with make(key, alias):
            entered.set()
            assert release.wait(DEADLINE)
        with make(key, alias, timeout=DEADLINE):
            released.set()

    async def let_go():
        await until(lambda: waiters(key, alias) == 1)
        release.set()

    async def main():
        await until(entered.is_set)
        letting_go = asyncio.create_task(let_go())
        async with make(key, alias, timeout=DEADLINE):
            await until(lambda: waiters(key, alias) == 1)
            assert not released.is_set()
        await letting_go
        await until(released.is_set)

    worker = threading.Thread(target=thread)
    worker.start()
    run(main())
    worker.join(DEADLINE)
    assert not worker.is_alive()


def test_one_loop_after_the_other_with_one_lock_object(alias):
    mine = make(new_key(), alias)

    async def main():
        async with mine:
            await asyncio.sleep(0)
        return mine.fencing_token

    tokens = [run(main()) for _ in range(5)]
    assert tokens == sorted(set(tokens))


def test_task_group_cancels_the_waiters_of_a_failed_sibling(alias):
    key = new_key()

    async def wait():
        async with make(key, alias, timeout=DEADLINE):
            raise AssertionError("nobody gets the lock")

    async def fail():
        await until(lambda: waiters(key, alias) == 5)
        raise ValueError("on purpose")

    async def main():
        async with make(key, alias):
            with pytest.raises(ExceptionGroup) as raised:
                async with asyncio.TaskGroup() as group:
                    for _ in range(5):
                        group.create_task(wait())
                    group.create_task(fail())
            assert [type(error) for error in raised.value.exceptions] == [ValueError]

    run(main())
    nothing_left(key, alias)


def test_a_lock_that_is_lost_is_told(alias):
    key = new_key()

    async def main():
        with pytest.raises(LockLostError):
            async with make(key, alias, ttl=1.5) as held:
                assert await asyncio.to_thread(force_release, key, backend=alias)
                await until(lambda: held.lost)
                with pytest.raises(LockLostError):
                    held.check()

    run(main())
    nothing_left(key, alias)


def test_body_keeps_its_exception_and_gets_a_note(alias):
    key = new_key()

    async def main():
        with pytest.raises(KeyError) as raised:
            async with make(key, alias, ttl=1.5) as held:
                await asyncio.to_thread(force_release, key, backend=alias)
                await until(lambda: held.lost)
                raise KeyError("mine")
        assert "lost" in "".join(raised.value.__notes__)

    run(main())


def test_a_dropped_coroutine_frees_its_lock(alias):
    """Scenario 46: dropped in the body, never awaited again."""
    key = new_key()

    async def body(entered):
        async with make(key, alias, timeout=5):
            entered.append(True)
            await asyncio.Event().wait()

    async def main():
        entered = []
        task = asyncio.ensure_future(body(entered))
        await until(lambda: entered)
        asyncio.get_running_loop().set_exception_handler(lambda *args: None)
        asyncio.tasks._unregister_task(task)  # as when the loop is dropped with it
        coroutine = task.get_coro()
        del task
        coroutine.close()
        del coroutine

    for _ in range(5):
        run(main())
        gc.collect()
        nothing_left(key, alias)


def test_a_lock_in_a_reference_cycle_frees_itself(alias):
    key = new_key()

    async def main():
        class Cycle:
            pass

        cycle = Cycle()
        cycle.itself = cycle
        cycle.lock = make(key, alias)
        await cycle.lock.__aenter__()
        return weakref.ref(cycle)

    gone = run(main())
    gc.collect()
    assert gone() is None
    nothing_left(key, alias)


def test_a_loop_that_is_closed_over_a_waiter(alias):
    """A loop may end with tasks in it: their places in the line must not hold up others."""
    key = new_key()

    async def wait():
        async with make(key, alias, timeout=DEADLINE):
            pass

    async def main():
        tasks.append(asyncio.ensure_future(wait()))
        await until(lambda: waiters(key, alias) == 1)

    tasks = []
    with make(key, alias):
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *args: None)
        loop.run_until_complete(main())
        tasks.pop().get_coro().close()
        loop.close()
        gc.collect()
        assert not is_free(key, alias)
    nothing_left(key, alias)


def test_holder_is_told_from_a_coroutine(alias):
    key = new_key()

    async def main():
        async with make(key, alias, note="nightly"):
            return await asyncio.to_thread(lock_info, key, backend=alias)

    info = run(main())
    if info.holder is not None:
        assert info.holder.note == "nightly"
        assert info.holder.thread == threading.current_thread().name
