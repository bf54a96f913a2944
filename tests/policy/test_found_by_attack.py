"""A lock file that was deleted (found by somebody who knew only the README and the promises)."""

import os

import pytest

from angee_jobs.locks import (
    LockLostError,
    get_lock_backend,
    lock,
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
