"""Waiters whose event loop is blocked or closed keep no free lock from others; a blocking wait in a loop is refused."""

import asyncio
import threading
import time

import pytest
from django.core.exceptions import SynchronousOnlyOperation

from angee_jobs.locks import clock, lock, task_lock
from tests.support.aio import waiting_here
from tests.support.servers import eventually


def test_a_wait_in_a_running_loop_is_refused_as_by_the_orm():
    """Seen: it froze the loop for its timeout, and the holder with it."""

    async def main():
        async with lock("K", backend="local"):
            started = clock.now()
            with pytest.raises(SynchronousOnlyOperation, match="async with"):
                lock("K", timeout=3, backend="local").acquire()
            with pytest.raises(SynchronousOnlyOperation), task_lock("K", timeout=3, backend="local"):
                pass
            assert clock.now() - started < 2
            assert not lock("K", backend="local").acquire(), "one try is one short request"
        assert lock("K", timeout=3, backend="local").acquire(), "it is free, so there is nothing to wait for"

    asyncio.run(main())


def test_django_allow_async_unsafe_is_honoured(monkeypatch):
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")

    async def main():
        async with lock("K", backend="local"):
            assert not lock("K", timeout=0.2, backend="local").acquire()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["closed", "blocked"])
def test_a_free_lock_is_had_beside_a_waiter_that_does_not_answer(how):
    """Seen: the first in the queue was a task of a loop that had been closed, and a thread was refused a free lock."""
    key = f"silent-{how}"
    holder = lock(key, backend="local")
    assert holder.acquire()
    loop = asyncio.new_event_loop()
    blocked = threading.Event()

    async def wait():
        async with lock(key, timeout=40, backend="local"):
            pass

    def run():
        task = loop.create_task(wait())
        kept.append(task)
        while not waiting_here(lock(key).name, "local"):
            loop.run_until_complete(asyncio.sleep(0.01))
        if how == "closed":
            loop.close()
        else:
            loop.call_soon(lambda: blocked.wait(30))
            loop.run_until_complete(asyncio.wait([task], timeout=30))
            loop.close()

    kept = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    eventually(lambda: waiting_here(lock(key).name, "local"), 10)
    time.sleep(0.3)  # so that the loop is blocked, or closed
    assert holder.release()
    started = clock.now()
    mine = lock(key, timeout=10, backend="local")
    assert mine.acquire()
    assert clock.now() - started < 6
    assert mine.release()
    blocked.set()
    thread.join(40)


def test_a_waiter_that_was_passed_over_joins_again():
    """Seen: its queue was gone when its loop went on, and it was refused a free lock at the end of its time."""
    holder = lock("passed-over", backend="local")
    assert holder.acquire()
    blocked, waited = threading.Event(), []

    async def wait():
        started = clock.now()
        async with lock("passed-over", timeout=30, backend="local"):
            waited.append(clock.now() - started)

    async def main():
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.3)
        blocked.set()
        time.sleep(4)  # noqa: ASYNC251  that is what blocks the loop
        await task

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert blocked.wait(10)
    assert holder.release()
    with lock("passed-over", timeout=20, backend="local"):
        pass
    thread.join(40)
    assert waited, "refused"
    assert waited[0] < 15
