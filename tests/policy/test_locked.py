"""`@locked`: which functions it takes, and when a bad argument is refused."""

import asyncio
import functools

import pytest

from angee_jobs.locks import (
    lock,
    locked,
    task_lock_is_held,
)


def test_locked_knows_what_the_call_of_an_object_runs():
    class Task:
        async def __call__(self):
            return task_lock_is_held("object", backend="local")

    class Rows:
        def __call__(self):
            yield 1

    assert asyncio.run(locked("object", backend="local")(Task())())
    for bad in (Rows(), functools.partial(Rows().__call__), 5):
        with pytest.raises(TypeError, match="@locked"):
            locked("object", backend="local")(bad)


def test_s33_a_coroutine_function_is_locked_while_it_is_awaited(key):
    calls = []

    async def both():
        entered, leave = asyncio.Event(), asyncio.Event()

        @locked(key, on_refused="skip", backend="local")
        async def work():
            calls.append(lock(key, backend="local").acquire())
            entered.set()
            await leave.wait()
            calls.append(lock(key, backend="local").acquire())
            return "done"

        assert asyncio.iscoroutinefunction(work)
        first = asyncio.create_task(work())
        await entered.wait()
        second = await work()
        leave.set()
        return await first, second

    assert asyncio.run(both()) == ("done", None)
    assert calls == [False, False]
    assert lock(key, backend="local").acquire()


def test_s33_a_generator_function_is_refused_where_it_is_decorated():
    def numbers():
        yield 1

    async def more_numbers():
        yield 1

    for function in (numbers, more_numbers):
        with pytest.raises(TypeError, match=function.__name__):
            locked("x", backend="local")(function)


@pytest.mark.parametrize("on_refused", ["Skip", "", None, True])
def test_a_bad_on_refused_is_refused_where_it_is_written(on_refused):
    with pytest.raises(ValueError, match=repr(on_refused)):
        locked("x", on_refused=on_refused)


def test_a_bad_fixed_key_is_refused_where_it_is_written():
    for bad, error in (("", ValueError), (None, TypeError), (42, TypeError)):
        with pytest.raises(error):
            locked(bad)


def test_a_bad_key_of_a_call_is_refused_at_the_call():
    @locked(lambda key: key, backend="local")
    def work(key):
        pytest.fail("the body ran")

    for bad, error in (("", ValueError), (None, TypeError), (42, TypeError)):
        with pytest.raises(error):
            work(bad)


def test_unknown_options_are_refused():
    for use in (lambda: lock("x", tll=5), lambda: locked("x", tll=5)):
        with pytest.raises(TypeError, match="tll"):
            use()


def test_an_error_in_the_key_function_is_that_of_the_call():
    @locked(lambda: 1 / 0, backend="local")
    def work():
        pytest.fail("the body ran")

    with pytest.raises(ZeroDivisionError):
        work()
