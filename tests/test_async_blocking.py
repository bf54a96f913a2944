"""No request of a lock runs on the event loop, nor waits for one of another backend."""

import asyncio
import contextlib
import threading
import time

from angee_jobs.locks import LockNotAcquiredError
from tests.aio import DEADLINE, make, new_key, run


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
        loop.slow_callback_duration = 1.0
        longest = 0.0
        stop = asyncio.Event()

        async def pulse():
            nonlocal longest
            while not stop.is_set():
                before = time.monotonic()
                await asyncio.sleep(0.002)
                longest = max(longest, time.monotonic() - before)

        pulsing = asyncio.create_task(pulse())
        with slow_backend(alias, 1.1, threads):  # no verb may run on the loop: with this it would show
            async with make(other, alias) as held:
                await held.aextend()
                await held.ainfo()
        longest_when_slow, longest = longest, 0.0
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(one())
        stop.set()
        await pulsing
        return longest_when_slow

    longest_when_slow = run(main(), debug=True)
    slow = [record.getMessage() for record in caplog.records if "took" in record.getMessage()]
    assert not [text for text in slow if "Executing" in text], slow
    assert longest_when_slow < 1.09
    assert len(threads) >= 4
    assert threading.get_ident() not in threads, "a verb ran on the loop"


@contextlib.contextmanager
def slow_backend(alias, seconds, threads):
    """Every verb takes at least so long, and notes its thread."""
    from unittest import mock

    from angee_jobs.locks import lock_backends

    backend = lock_backends.verbs(alias)

    def slow(verb):
        def call(*args, **kwargs):
            threads.append(threading.get_ident())
            time.sleep(seconds)
            return verb(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("acquire", "extend", "release", "inspect"):
            stack.enter_context(mock.patch.object(backend, name, slow(getattr(backend, name))))
        yield


def test_a_backend_that_hangs_keeps_no_other_waiting():
    """Each has threads of its own for the requests of coroutines."""

    async def main():
        with slow_backend("sqlite", 2.5, []):
            stuck = [asyncio.create_task(make(new_key(), "sqlite").aacquire()) for _ in range(6)]
            await asyncio.sleep(0.05)
            started = time.monotonic()
            async with make(new_key(), "local", timeout=2):
                pass
            assert not await refused_and_told("local")
            took = time.monotonic() - started
            await asyncio.gather(*stuck)
        return took

    assert run(main()) < 2.3


async def refused_and_told(alias):
    key = new_key()
    async with make(key, alias):
        try:
            async with make(key, alias):
                return True
        except LockNotAcquiredError:
            return False
