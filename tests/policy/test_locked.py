"""`@locked`: which functions it takes, what its calls do to each other, and when a bad argument is refused."""

import asyncio
import functools
import threading
import unittest

import pytest

from angee_jobs.locks import (
    LockNotAcquiredError,
    lock,
    locked,
    task_lock_is_held,
)
from angee_jobs.locks.testing import ContractCase
from tests.support.strategies import Local, SqliteTable


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


class Calls(ContractCase):
    def test_s33_one_decorated_function_called_from_two_threads(self) -> None:
        inside, go_on = threading.Event(), threading.Event()
        calls: list[str] = []

        @locked(self.key, on_refused="skip", backend=self.alias)
        def work(name: str) -> str:
            calls.append(name)
            inside.set()
            go_on.wait(10)
            return name

        first = self.in_background(work, "first")
        assert inside.wait(10)
        for _ in range(3):
            assert self.in_background(work, "refused").result() is None
        self.assert_held()
        go_on.set()
        assert first.result() == "first"
        self.assert_free()
        assert work("again") == "again"
        assert calls == ["first", "again"]

    def test_s33_decorated_calls_from_many_threads(self) -> None:
        keys = [self.new_key() for _ in range(3)]
        inside = [0, 0, 0]
        most = [0, 0, 0]

        @locked(lambda number: keys[number], timeout=30, backend=self.alias)
        def work(number: int) -> None:
            inside[number] += 1
            most[number] = max(most[number], inside[number])
            inside[number] -= 1

        def call() -> None:
            for number in (0, 1, 2) * 5:
                work(number)

        for thread in [self.in_background(call) for _ in range(6)]:
            thread.result(40)
        assert most == [1, 1, 1]
        for key in keys:
            self.assert_free(key)

    def test_s33_skip_does_not_swallow_the_refusal_of_a_nested_lock(self) -> None:
        other = self.new_key()

        @locked(self.key, on_refused="skip", backend=self.alias)
        def nested_block() -> None:
            with lock(other, backend=self.alias):
                self.fail("two holders")

        @locked(self.key, on_refused="skip", backend=self.alias)
        def nested_function() -> None:
            refusing()

        @locked(other, backend=self.alias)
        def refusing() -> None:
            self.fail("two holders")

        with self.lock(other):
            for function in (nested_block, nested_function):
                with pytest.raises(LockNotAcquiredError) as caught:
                    function()
                assert caught.value.name == other.name
                self.assert_free()

    def test_s33_raise_is_the_default_and_the_function_stays_what_it_was(self) -> None:
        @locked(lambda a, *, b: self.key, backend=self.alias)
        def work(a: int, *, b: int) -> int:
            """Doc."""
            return a + b

        assert work(1, b=2) == 3
        assert (work.__name__, work.__doc__) == ("work", "Doc.")
        with self.lock(), pytest.raises(LockNotAcquiredError):
            work(1, b=2)
        self.assert_free()


class TestLocal(Calls, unittest.TestCase):
    strategy = Local()


class TestSqlite(Calls, unittest.TestCase):
    strategy = SqliteTable()
