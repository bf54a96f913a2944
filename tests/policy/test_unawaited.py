"""A call whose ``await`` or ``with`` was forgotten: an error, where it was an answer that is always yes."""

import asyncio
import inspect

import pytest
from asgiref.sync import async_to_sync, iscoroutinefunction

from angee_jobs.locks import Lock, lock, task_lock


@pytest.mark.parametrize("name", ["aacquire", "arelease", "aextend", "ainfo"])
def test_a_coroutine_that_is_not_awaited_is_no_condition(name):
    billing = lock("unawaited", backend="local")
    with pytest.raises(TypeError, match=rf"`if await \.\.\.\.{name}\(\):`"):
        if getattr(billing, name)():
            pytest.fail("it was true")
    assert not billing.held


def test_task_lock_is_no_condition():
    with pytest.raises(TypeError, match="`with task_lock"):
        bool(task_lock("unawaited", backend="local"))


async def _directly(billing: Lock) -> bool:
    return await billing.aacquire()


async def _gathered(billing: Lock) -> bool:
    return (await asyncio.gather(billing.aacquire()))[0]


async def _in_a_task(billing: Lock) -> bool:
    return await asyncio.create_task(billing.aacquire())


async def _ensured(billing: Lock) -> bool:
    return await asyncio.ensure_future(billing.aacquire())


async def _in_time(billing: Lock) -> bool:
    return await asyncio.wait_for(billing.aacquire(), 10)


async def _in_a_group(billing: Lock) -> bool:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(billing.aacquire())
    return task.result()


async def _from_another_thread(billing: Lock) -> bool:
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(billing.aacquire(), loop).result(10))


WAYS = [_directly, _gathered, _in_a_task, _ensured, _in_time, _in_a_group, _from_another_thread]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__[1:])
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_every_way_to_await_it(way, debug):
    async def main() -> None:
        billing = lock("unawaited", backend="local")
        assert await way(billing) is True
        assert await way(lock("unawaited", backend="local")) is False
        assert await billing.arelease() is True

    asyncio.run(main(), debug=debug)


def test_it_is_run_and_told_as_a_coroutine():
    billing = lock("unawaited", backend="local")
    assert asyncio.run(billing.aacquire()) is True
    assert async_to_sync(billing.arelease)() is True
    assert iscoroutinefunction(billing.aacquire)
    coroutine = billing.aacquire()
    assert inspect.isawaitable(coroutine)
    assert asyncio.iscoroutine(coroutine)
    coroutine.close()


def test_a_task_that_waits_in_it_is_cancelled():
    async def main() -> None:
        with lock("unawaited", backend="local"):
            task = asyncio.create_task(lock("unawaited", backend="local").aacquire(timeout=60))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
