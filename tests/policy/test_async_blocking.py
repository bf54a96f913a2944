"""No request of a lock runs on the event loop, nor waits for one of another backend."""

import asyncio
import contextlib
import threading
import time

from angee_jobs.locks import LockNotAcquiredError
from tests.support.aio import DEADLINE, make, new_key, run, until


def test_nothing_blocks_the_loop(alias, caplog):
    """asyncio's debug mode reports every step of the loop that took more than `slow_callback_duration`."""
    key, other = new_key(), new_key()
    threads: list[int] = []

    async def one():
        for _ in range(3):
            async with make(key, alias, timeout=DEADLINE):
                await asyncio.sleep(0.005)

    async def main():
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 3.0  # longer than a busy machine stands still
        stop = asyncio.Event()

        async def pulse():
            nonlocal pulses
            while not stop.is_set():
                pulses += 1
                await asyncio.sleep(0.002)

        pulsing = asyncio.create_task(pulse())
        with slow_backend(alias, the_loop_goes_on, threads):
            async with make(other, alias) as held:
                await held.aextend()
                await held.ainfo()
            assert len(threads) >= 4
            async with asyncio.TaskGroup() as group:
                for _ in range(10):
                    group.create_task(one())
        stop.set()
        await pulsing

    pulses = 0

    def the_loop_goes_on():
        """Else the operation runs on the loop, or the loop waits for it."""
        last, started = pulses + 2, time.monotonic()
        while pulses < last:
            assert time.monotonic() - started < 10, "the loop stands still while an operation is under way"
            time.sleep(0.001)

    run(main(), debug=True)
    slow = [record.getMessage() for record in caplog.records if "took" in record.getMessage()]
    assert not [text for text in slow if "Executing" in text], slow
    assert threading.get_ident() not in threads, "an operation ran on the loop"


@contextlib.contextmanager
def slow_backend(alias, wait, threads):
    """Every operation calls `wait` first, and notes its thread."""
    from unittest import mock

    from angee_jobs.locks import lock_backends

    backend = lock_backends.operations(alias)

    def slow(operation):
        def call(*args, **kwargs):
            threads.append(threading.get_ident())
            wait()
            return operation(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("acquire", "extend", "release", "inspect", "inspect_many"):
            stack.enter_context(mock.patch.object(backend, name, slow(getattr(backend, name))))
        yield


def test_a_backend_that_hangs_keeps_no_other_waiting():
    """Each has threads of its own for the requests of coroutines."""

    async def main():
        threads, go_on = [], threading.Event()
        with slow_backend("sqlite", lambda: go_on.wait(20), threads):
            stuck = [asyncio.create_task(make(new_key(), "sqlite").aacquire()) for _ in range(6)]
            await until(lambda: threads)
            async with make(new_key(), "local", timeout=10):
                pass
            assert not await refused_and_told("local")
            assert not go_on.is_set()
            assert not any(task.done() for task in stuck)
            go_on.set()
            await asyncio.gather(*stuck)

    run(main())


async def refused_and_told(alias):
    key = new_key()
    async with make(key, alias):
        try:
            async with make(key, alias):
                return True
        except LockNotAcquiredError:
            return False
