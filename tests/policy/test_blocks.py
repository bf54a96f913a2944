"""What a block costs, and what it leaves, where no promise would show it."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref

import pytest

from angee_jobs.locks import LockLostError, force_release, lock, lock_backends, task_lock, task_lock_is_held
from angee_jobs.locks.background import Finalizer, background
from tests.support.servers import eventually


@pytest.fixture
def notes(monkeypatch):
    """What the renewal thread is told, while this test lasts."""
    told = []
    take = background._take
    monkeypatch.setattr(background, "_take", lambda posted: (told.append(posted), take(posted)))
    with lock("starts-the-thread"):
        pass
    return told


def the_thread_has_read():
    read = threading.Event()
    background.post(read.set)
    assert read.wait(10)


def several(key, **options):
    return lock([key, f"{key}-too"], **options)


@pytest.mark.parametrize("form", [lock, task_lock, several])
def test_a_block_that_is_left_says_nothing_to_the_renewal_thread(notes, form):
    """An interpreter that drops what it calls before the call would look like a block that nobody left."""
    gc.collect()  # what other tests have left says what it has to say
    the_thread_has_read()
    notes.clear()
    for _ in range(20):
        with form("left"):
            pass
        with contextlib.suppress(KeyError), form("raises"):
            raise KeyError
        with contextlib.ExitStack() as stack:
            stack.enter_context(form("stacked"))
    asyncio.run(leave_blocks_of_tasks(form))
    the_thread_has_read()
    assert [note for note in notes if isinstance(note, Finalizer)] == []


async def leave_blocks_of_tasks(form):
    for _ in range(20):
        async with form("left"):
            pass
        with contextlib.suppress(KeyError):
            async with form("raises"):
                raise KeyError
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(form("stacked"))


@pytest.mark.parametrize("form", [lock, several])
@pytest.mark.parametrize("alias", ["local", "sqlite"])
def test_a_task_leaves_its_block_before_the_renewal_thread_does(notes, alias, form):
    """Between the call of ``__aexit__`` and the first step of its coroutine, the interpreter drops what it called.

    The renewal thread took the block for one that was gone, and released. So a hold that had been lost was not told as
    lost (seen as a violation of ``ownership`` in the torture run).
    """

    async def leave(mine):
        leave = mine.__aexit__
        await mine.__aenter__()
        lock_backends.operations(alias).force_release("angee:name:task-leaves", time.monotonic() + 10)
        leaving = leave(None, None, None)
        del leave
        the_thread_has_read()
        await leaving

    mine = form("task-leaves", backend=alias)
    with pytest.raises(LockLostError):
        asyncio.run(leave(mine))


def test_a_coroutine_that_leaves_and_is_never_awaited_frees_its_lock(notes):
    async def leave(mine):
        leave = mine.__aexit__
        await mine.__aenter__()
        leave(None, None, None).close()

    asyncio.run(leave(lock("never-awaited")))
    eventually(lambda: not task_lock_is_held("never-awaited"))


def test_a_lock_is_gone_when_nobody_has_it_any_more():
    """No cycle keeps it until the next collection: what it holds would stay taken until then."""
    gc.collect()
    gc.disable()
    try:
        for used in ("block", "pair", "by hand", "coroutine"):
            mine = lock(f"gone-{used}".replace(" ", "-"))
            if used == "block":
                with mine:
                    pass
            elif used == "pair":
                assert mine.acquire()
                assert mine.release()
            elif used == "by hand":
                mine.__enter__()
                mine.__exit__(None, None, None)
            else:

                async def enter(mine=mine):
                    async with mine:
                        pass

                asyncio.run(enter())
                del enter
            watched = weakref.ref(mine)
            del mine
            eventually(lambda watched=watched: watched() is None, what=used)  # a thread may be dropping it
    finally:
        gc.enable()


@pytest.mark.parametrize("has_notes", [False, True])
def test_an_exception_that_takes_no_note_of_the_loss_still_leaves_the_block(has_notes):
    class Refuses(Exception):
        def add_note(self, note):
            raise ZeroDivisionError

    error = Refuses() if not has_notes else KeyError()
    if has_notes:
        error.__notes__ = "no list"
    with pytest.raises(type(error)) as raised, lock("lost", backend="local"):
        assert force_release("lost", backend="local")
        raise error
    assert raised.value is error

    async def leave():
        async with lock("lost", backend="local"):
            assert force_release("lost", backend="local")
            raise error

    with pytest.raises(type(error)) as raised:
        asyncio.run(leave())
    assert raised.value is error
