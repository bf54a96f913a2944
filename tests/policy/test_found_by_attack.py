"""What somebody found who knew only the README and the promises."""

import asyncio
import copy
import functools
import math
import os
import pickle

import pytest
from django.db import transaction

from angee_jobs.locks import (
    LockLostError,
    LockNotAcquiredError,
    force_release,
    get_lock_backend,
    lock,
    lock_lost,
    locked,
    task_lock_is_held,
)
from tests.support.servers import eventually


@pytest.fixture
def sqlite_file():
    backend = get_lock_backend("sqlite")
    with lock("warm", backend="sqlite"):
        pass
    return backend.path()


def test_a_lock_file_that_was_deleted_holds_nothing_any_more(sqlite_file):
    kept = lock("deleted", backend="sqlite", ttl=60)
    assert kept.acquire()
    for suffix in ("", "-wal", "-shm"):
        os.unlink(sqlite_file + suffix)
    with lock("deleted", backend="sqlite") as other:  # as another process would find it
        assert other.held
        assert not kept.extend()
        assert kept.lost
        assert not kept.release()
        assert task_lock_is_held("deleted", backend="sqlite")


def test_a_deleted_lock_file_is_a_loss_of_the_block(sqlite_file):
    with pytest.raises(LockLostError), lock("block", backend="sqlite", ttl=1.5) as held:
        os.unlink(sqlite_file)
        eventually(lambda: held.lost, 5)


def test_a_receiver_that_would_end_the_process_does_not_silence_the_next_loss():
    heard = []

    def leave(**kwargs):
        if "brief" in kwargs["key"].name:  # and not what an earlier test has left
            heard.append(kwargs["key"])
        raise SystemExit(1)

    lock_lost.connect(leave)
    try:
        for number in (1, 2):
            brief = lock(f"brief {number}", ttl=0.05, backend="local")
            assert brief.acquire()
            eventually(lambda number=number: len(heard) == number, 5)
    finally:
        lock_lost.disconnect(leave)


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


def test_a_guard_may_wait_for_ever():
    with transaction.atomic(), lock("guarded", backend="local") as held, held.guard(timeout=math.inf):
        pass


def test_a_lock_is_not_copied():
    with lock("one", backend="local") as held:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="detach"):
                duplicate(held)


def test_what_a_note_says_does_nothing_to_a_terminal_or_a_log(caplog):
    held = lock("noted", note="a\n\x1b[31mb")
    assert held.acquire()
    with pytest.raises(LockNotAcquiredError) as refused, lock("noted"):
        pytest.fail("two holders")
    assert str(refused.value.holder.holder).isprintable()
    assert str(refused.value).isprintable()
    assert force_release("noted", reason="c\nd\x1b", user="e\nf")
    assert [record.getMessage() for record in caplog.records if not record.getMessage().isprintable()] == []
    assert "reason: c\\x0ad\\x1b" in caplog.text


@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_a_fencing_token_that_can_be_none_is_told_before_any_request(alias):
    held = lock("named", backend=alias)
    assert held.acquire()
    for odd in ("5", 1.0, True, object()):
        with pytest.raises(TypeError, match="fencing_token must be an int"):
            force_release("named", fencing_token=odd, backend=alias)
    for nobodys in (2**70, 0, -1, held.fencing_token + 1):
        assert force_release("named", fencing_token=nobodys, backend=alias) is False
    assert held.release()
