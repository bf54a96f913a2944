"""Cancellation at every point of a coroutine's lock, and `cancel_on_loss`."""

import asyncio
import contextlib
import random
import threading

import pytest

from angee_jobs.locks import LockLostError, LockNotAcquiredError, force_release, lock_backends
from tests.support.aio import DEADLINE, make, new_key, nothing_left, run, until, waiters

ROUNDS = 300


async def block(key, alias, wait, entered=None):
    async with make(key, alias, timeout=wait):
        if entered is not None:
            entered.append(True)
        await asyncio.sleep(0.001)


async def cancel_after(task, seconds):
    """Cancel the task then; True if it ended as cancelled, False if it had come to its end before."""
    await asyncio.wait([task], timeout=seconds)
    asked = task.cancel()
    done, _ = await asyncio.wait([task], timeout=10)
    assert done, "the task does not end"
    if task.cancelled():
        assert asked
        return True
    task.result()
    return False


async def usual_seconds(key, alias):
    """How long a block takes here, about."""
    loop = asyncio.get_running_loop()
    await block(key, alias, 0)
    times = []
    for _ in range(5):
        started = loop.time()
        await block(key, alias, 0)
        times.append(loop.time() - started)
    return min(times)  # the machine may have stood still in one of them


@pytest.mark.slow
@pytest.mark.parametrize("contended", [False, True], ids=["alone", "contended"])
def test_cancelled_at_random_instants(alias, contended):
    key = new_key()
    chance = random.Random(20)
    cancelled = 0

    async def contend(stop):
        rounds = 0
        while not stop.is_set():
            async with make(key, alias, timeout=DEADLINE):
                await asyncio.sleep(0)
            rounds += 1
            await asyncio.sleep(0.001)
        return rounds

    async def main():
        nonlocal cancelled
        usual = await usual_seconds(key, alias)
        stop = asyncio.Event()
        rounds = min(ROUNDS, max(40, int(1.0 / usual)))
        rivals = [asyncio.create_task(contend(stop)) for _ in range(2 if contended else 0)]
        turn = 0
        while turn < rounds or (cancelled <= 10 and turn < 10 * rounds):  # a block may have become faster meanwhile
            turn += 1
            task = asyncio.create_task(block(key, alias, DEADLINE))
            cancelled += await cancel_after(task, chance.uniform(0, usual * (3 if contended else 1.2)))
        stop.set()
        assert all(await asyncio.gather(*rivals))
        # What was cancelled in mid-acquire is given up behind the scenes: the next one gets its turn.
        async with make(key, alias, timeout=10):
            pass

    run(main())
    assert cancelled > 10
    nothing_left(key, alias)


@pytest.mark.parametrize("operation", ["acquire", "release"])
def test_cancelled_while_a_verb_is_under_way(alias, operation):
    """The storage grants (or frees) the lock after the caller has gone."""
    key = new_key()

    async def main():
        for _ in range(20):
            with held_up(alias, operation) as (reached, go_on):
                task = asyncio.create_task(block(key, alias, None))
                await until(reached.is_set)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                go_on.set()
            async with make(key, alias, timeout=10):
                pass

    run(main())
    nothing_left(key, alias)


@contextlib.contextmanager
def held_up(alias, operation):
    """The next call of the operation for a coroutine does its work only when it may go on."""
    from unittest import mock

    backend = lock_backends.operations(alias)
    real = getattr(backend, operation)
    reached, go_on = threading.Event(), threading.Event()

    def call(*args, **kwargs):
        if not reached.is_set() and threading.current_thread().name.startswith("angee-locks-call"):
            reached.set()
            assert go_on.wait(10)
        return real(*args, **kwargs)

    with mock.patch.object(backend, operation, call):
        try:
            yield reached, go_on
        finally:
            go_on.set()


def test_cancelled_waiters_do_not_hold_up_the_line(alias):
    """Anywhere in the line, the head above all."""
    key = new_key()

    async def main():
        entered = []
        async with make(key, alias):
            tasks = []
            for number in range(12):
                tasks.append(asyncio.create_task(block(key, alias, DEADLINE, entered)))
                await until(lambda number=number: waiters(key, alias) == number + 1)
            for number in (0, 1, 5, 11):
                tasks[number].cancel()
            await asyncio.wait([tasks[number] for number in (0, 1, 5, 11)])
            assert all(tasks[number].cancelled() for number in (0, 1, 5, 11))
            assert waiters(key, alias) == 8
        await asyncio.gather(*(task for task in tasks if not task.cancelled()))
        assert len(entered) == 8

    run(main())
    nothing_left(key, alias)


def test_asyncio_timeout_around_a_wait(alias):
    key = new_key()

    async def main():
        async with make(key, alias):
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.005):
                        await block(key, alias, DEADLINE)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(make(key, alias).aacquire(DEADLINE), 0.01)
        assert asyncio.current_task().cancelling() == 0

    run(main())
    nothing_left(key, alias)


def test_cancelled_in_the_body(alias):
    """Scenario 10: the caller sees its CancelledError, and the lock is free."""
    key = new_key()

    async def body(entered):
        async with make(key, alias):
            entered.append(True)
            await asyncio.Event().wait()

    async def main():
        for _ in range(20):
            entered = []
            task = asyncio.create_task(body(entered))
            await until(lambda entered=entered: entered)
            task.cancel("by the test")
            with pytest.raises(asyncio.CancelledError, match="by the test"):
                await task
            async with make(key, alias):  # at once: the block was left before the task ended
                pass

    run(main())
    nothing_left(key, alias)


def test_cancelled_again_while_leaving(alias):
    key = new_key()

    async def body(entered):
        async with make(key, alias):
            entered.append(True)
            await asyncio.Event().wait()

    async def main():
        for _ in range(10):
            entered = []
            with held_up(alias, "release") as (reached, go_on):
                task = asyncio.create_task(body(entered))
                await until(lambda entered=entered: entered)
                task.cancel()
                await until(reached.is_set)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                go_on.set()
            async with make(key, alias, timeout=10):
                pass

    run(main())
    nothing_left(key, alias)


# cancel_on_loss


def lose(key, alias):
    """Somebody else frees the lock; the loss is told at the next renewal at the latest."""
    threading.Thread(target=force_release, args=[key], kwargs={"backend": alias}).start()


def test_a_loss_cancels_the_body(alias):
    key = new_key()
    ends = []

    async def main():
        with pytest.raises(LockLostError):
            async with make(key, alias, ttl=1.5, cancel_on_loss=True):
                lose(key, alias)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    ends.append("cancelled")
                    raise
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)  # no cancellation comes late
        async with make(key, alias, cancel_on_loss=True):
            await asyncio.sleep(0.001)

    run(main())
    assert ends == ["cancelled"]
    nothing_left(key, alias)


def test_a_loss_inside_a_task_group(alias):
    key = new_key()

    async def job():
        async with make(key, alias, ttl=1.5, cancel_on_loss=True):
            lose(key, alias)
            await asyncio.Event().wait()

    async def main():
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.TaskGroup() as group:
                group.create_task(job())
                sibling = group.create_task(asyncio.Event().wait())
        assert [type(error) for error in raised.value.exceptions] == [LockLostError]
        assert sibling.cancelled()

    run(main())


def test_a_task_group_in_the_body_is_cancelled_as_a_whole(alias):
    key = new_key()
    ended = []

    async def child():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        with pytest.raises(LockLostError):
            async with make(key, alias, ttl=1.5, cancel_on_loss=True):
                async with asyncio.TaskGroup() as group:
                    for _ in range(3):
                        group.create_task(child())
                    lose(key, alias)

    run(main())
    assert len(ended) == 3


def test_a_body_that_ends_in_an_error_of_its_own_keeps_it(alias):
    key = new_key()

    async def main():
        with pytest.raises(KeyError) as raised:
            async with make(key, alias, ttl=1.5, cancel_on_loss=True):
                lose(key, alias)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise KeyError("mine") from None
        assert "lost" in "".join(raised.value.__notes__)
        assert asyncio.current_task().cancelling() == 0

    run(main())


def test_a_body_that_swallows_the_cancellation_is_told(alias):
    key = new_key()

    async def main():
        with pytest.raises(LockLostError):
            async with make(key, alias, ttl=1.5, cancel_on_loss=True):
                lose(key, alias)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0

    run(main())


def test_somebody_elses_cancellation_stays_one(alias):
    """Lost and cancelled at once: the caller who cancelled must see it."""
    key = new_key()

    async def body(entered):
        async with make(key, alias, ttl=1.5, cancel_on_loss=True) as held:
            entered.append(held)
            await asyncio.Event().wait()

    async def main():
        for both in (False, True):
            entered = []
            task = asyncio.create_task(body(entered))
            await until(lambda entered=entered: entered)
            if both:
                with force_loss_without_letting_the_task_run(entered[0]):
                    task.cancel()
            else:
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())
    nothing_left(key, alias)


@contextlib.contextmanager
def force_loss_without_letting_the_task_run(held):
    from angee_jobs.locks.renewal import renewer

    renewer.lose(held._hold, "by the test")
    yield
    renewer.abandon(held._hold)


def test_asyncio_timeout_and_a_loss(alias):
    """The block's cancellation must not be taken for the time-out's, nor the other way round."""
    key = new_key()

    async def main():
        with pytest.raises(LockLostError):
            async with asyncio.timeout(10):
                async with make(key, alias, ttl=1.5, cancel_on_loss=True):
                    lose(key, alias)
                    await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                async with make(key, alias, cancel_on_loss=True):
                    await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0

    run(main())
    nothing_left(key, alias)


def test_cancel_on_loss_needs_a_task(alias):
    with pytest.raises(ValueError, match="async with"):
        with make(new_key(), alias, cancel_on_loss=True):
            pass


def test_no_cancellation_after_the_block(alias):
    """The lock is found to be gone only as it is released: nothing is left to cancel."""
    key = new_key()

    async def main():
        for _ in range(5):
            with pytest.raises(LockLostError):
                async with make(key, alias, ttl=30, cancel_on_loss=True):
                    force_release(key, backend=alias)  # on the loop's thread: the task cannot be cancelled meanwhile
            await asyncio.sleep(0.005)
            assert asyncio.current_task().cancelling() == 0
        with pytest.raises(LockNotAcquiredError):
            async with make(key, alias), make(key, alias, cancel_on_loss=True):
                pass
        await asyncio.sleep(0.005)

    run(main())
