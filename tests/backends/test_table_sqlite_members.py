"""Shared and placed holds in the lock file: the rows that keep the row of their key, and an exclusive waiter's word."""

import contextlib

import pytest

from angee_jobs.locks import TableLockBackend, clock
from angee_jobs.locks.backends.base import ALONE, SHARED, WANTED_SECONDS, Extension
from angee_jobs.locks.backends.table import sqlite_sql
from angee_jobs.locks.hold import new_owner_id
from tests.support.pg_helpers import alias_with, within

NAME = "angee:name:billing"


@pytest.fixture
def backend(tmp_path):
    with contextlib.ExitStack() as stack:
        aliased = alias_with("members", "default", NAME=str(tmp_path / "db.sqlite3"))
        made = TableLockBackend(alias=stack.enter_context(aliased))
        stack.callback(made.close)
        yield made


def acquire(backend, places, owner=None, ttl=30.0):
    return backend.acquire(NAME, owner or new_owner_id(places), ttl, "{}", within())


def end_of_the_row(backend):
    """When the row of the key says that it ends, and when the last hold does."""
    backend.file.run(within(), sqlite_sql.data_version, ())
    rows = backend.file._connection.execute("SELECT expires FROM lock UNION ALL SELECT max(expires) FROM member")
    return [end for (end,) in rows]


def test_the_row_of_the_key_ends_with_the_last_hold(backend):
    """However they end: an exclusive hold looks at that row alone."""
    first, second, third = (new_owner_id(places) for places in (SHARED, 3, 3))
    for owner, ttl in ((first, 30.0), (second, 60.0), (third, 20.0)):
        assert acquire(backend, SHARED, owner, ttl)
    longest = first

    def check():
        row, last = end_of_the_row(backend)
        assert row == last
        assert not acquire(backend, ALONE)

    check()
    assert backend.extend([Extension(NAME, longest, 90.0)], within()) == [longest]
    check()
    longest = new_owner_id(SHARED)
    assert backend.adopt(NAME, first, longest, 10.0, "{}", within()), "with a shorter lease than before"
    check()
    assert backend.release(NAME, third, within())
    check()
    assert backend.release(NAME, second, within()), "the last one to end"
    check()
    assert backend.release(NAME, longest, within())
    assert acquire(backend, ALONE)


def test_a_renewal_of_many_holds_of_one_key_grows_with_their_number(backend):
    """Each looked for the last of all: a renewal of 1000 kept the file for half a second."""

    def steps(count):
        owners = [new_owner_id(SHARED) for _ in range(count)]
        for owner in owners:
            assert acquire(backend, SHARED, owner)
        batch, taken = [Extension(NAME, owner, 60.0) for owner in owners], []
        backend.file._connection.set_progress_handler(lambda: taken.append(1) and None, 100)
        assert len(backend.extend(batch, within())) == count
        backend.file._connection.set_progress_handler(None, 100)
        assert all(backend.release(NAME, owner, within()) for owner in owners)
        return len(taken)

    assert steps(300) < 20 * steps(30)


def test_an_owner_that_asks_again_is_refused(backend):
    """As an exclusive one is: what was granted to a request without an answer is released by its owner id."""
    for places in (ALONE, SHARED, 3):
        owner = new_owner_id(places)
        connection = backend.file._connection
        assert acquire(backend, places, owner)
        assert acquire(backend, places, owner) is None
        assert connection in (None, backend.file._connection), "it is no error of the file"
        assert backend.release(NAME, owner, within())
        assert not backend.release(NAME, owner, within())


def test_a_waiter_that_soon_gives_up_does_not_shorten_the_word_of_another(backend):
    shared = new_owner_id(SHARED)
    assert acquire(backend, SHARED, shared)
    assert backend.remaining(NAME, within(), ALONE)
    assert backend.remaining(NAME, clock.now() + 0.001, ALONE)
    word = backend.remaining(NAME, within(), SHARED)
    assert word is not None and word > WANTED_SECONDS / 2
    assert backend.release(NAME, shared, within())
    assert acquire(backend, SHARED) is None, "it stands although the key is free"
    assert backend.remaining(NAME, within(), 3) is not None
    alone = new_owner_id(ALONE)
    assert acquire(backend, ALONE, alone)
    assert backend.release(NAME, alone, within())
    assert acquire(backend, SHARED), "it ended with the exclusive hold"


def test_a_word_that_an_earlier_boot_left_is_over(backend, monkeypatch):
    """Its end was days away: nobody could share the key until somebody had it alone."""
    real = sqlite_sql.machine_clock()
    monkeypatch.setattr(sqlite_sql, "now", lambda: real() + 500_000)
    assert acquire(backend, SHARED)
    assert backend.remaining(NAME, within(), ALONE)
    backend.close()
    monkeypatch.setattr(sqlite_sql, "now", real)
    monkeypatch.setattr(sqlite_sql, "_boot", lambda: "another")
    assert acquire(backend, SHARED)
