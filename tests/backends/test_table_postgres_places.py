"""Places and shared holds in the lock table on a real PostgreSQL: rows, other people's transactions, races."""

import threading
import time

import pytest

from angee_jobs.locks.backends.base import SHARED, WANTED_SECONDS, Extension
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.backends.table import postgres as table_postgres
from angee_jobs.locks.errors import LockBackendError
from angee_jobs.locks.hold import new_owner_id
from tests.support.pg_helpers import in_production, in_threads, within
from tests.support.pg_table import NAME, acquire, backend, direct
from tests.support.servers import eventually

__all__ = ["backend", "direct", "in_production"]

MARKS = "xmin, xmax, ctid"


def enter(backend, places, name=NAME, ttl=30.0):
    owner = new_owner_id(places)
    return owner, backend.acquire(name, owner, ttl, "{}", within())


def both(postgres):
    return [postgres.query(f"SELECT {MARKS} FROM {each}") for each in ("angee_jobs_tasklock", "angee_jobs_lockmember")]


def test_a_refused_try_for_a_place_writes_nothing(backend, postgres):
    held = [enter(backend, 2) for _ in range(2)]
    before = both(postgres)
    assert [enter(backend, 2)[1] for _ in range(10)] == [None] * 10
    assert acquire(backend)[1] is None
    assert both(postgres) == before
    for owner, _ in held:
        assert backend.release(NAME, owner, within())
    acquire(backend)
    before = both(postgres)
    assert [enter(backend, places)[1] for places in (2, SHARED)] == [None] * 2
    assert both(postgres) == before


def test_of_many_sessions_that_ask_at_once_so_many_are_let_in(postgres, in_production):
    """One statement alone would count with what it saw before it waited for the others."""
    postgres.query("TRUNCATE angee_jobs_tasklock, angee_jobs_lockmember")
    inside = threading.Semaphore(3)
    entered = most = now = 0
    mutex = threading.Lock()

    def work(number):
        nonlocal entered, most, now
        backend = TableLockBackend(alias="postgres")
        for _ in range(60):
            owner = new_owner_id(3)
            if backend.acquire(NAME, owner, 30.0, "{}", within(20)) is None:
                continue
            assert inside.acquire(blocking=False), "too many inside"
            with mutex:
                entered, now = entered + 1, now + 1
                most = max(most, now)
            time.sleep(0.001)
            with mutex:
                now -= 1
            inside.release()
            assert backend.release(NAME, owner, within(20))
        backend.close()

    in_threads(8, work)
    assert entered > 60
    assert most == 3


def test_the_same_owner_may_ask_twice_and_keeps_its_place(backend):
    """As after a connection that died before the answer; also while an exclusive waiter's word stands."""
    for places in (2, SHARED):
        owner, first = enter(backend, places)
        assert backend.remaining(NAME, within()) is not None
        again = backend.acquire(NAME, owner, 30.0, "{}", within())
        assert again.fencing_token > first.fencing_token
        assert again.place == first.place
        assert len(backend.inspect_many([NAME], within())) == 1
        assert backend.release(NAME, owner, within())
        assert backend.release(NAME, acquire(backend)[0], within()), "no second one was left, and the word is over"


def test_a_word_is_written_only_while_members_hold_the_key(backend, postgres):
    def words():
        [(count,)] = postgres.query("SELECT count(*) FROM angee_jobs_lockmember WHERE number = -1")
        return count

    owner, _ = acquire(backend)
    backend.remaining(NAME, within())
    assert words() == 0
    assert backend.release(NAME, owner, within())
    owner, _ = enter(backend, SHARED)
    assert enter(backend, SHARED)[1]
    backend.remaining(NAME, within())
    assert words() == 1
    for places in (SHARED, 2):
        assert enter(backend, places)[1] is None
        assert 0 < backend.remaining(NAME, within(), places) <= WANTED_SECONDS
    assert backend.extend([Extension(NAME, owner, 30)], within()) == [owner]
    eventually(lambda: enter(backend, SHARED)[1], 2 * WANTED_SECONDS)


def test_the_gate_ends_with_the_last_of_its_members(backend):
    short, _ = enter(backend, 2, ttl=20)
    long, _ = enter(backend, SHARED, ttl=60)
    assert 59 < backend.remaining(NAME, within()) <= 60
    assert backend.release(NAME, long, within())
    assert 19 < backend.remaining(NAME, within()) <= 20
    assert backend.extend([Extension(NAME, short, 90)], within()) == [short]
    assert 89 < backend.remaining(NAME, within()) <= 90
    adopted = new_owner_id(2)
    assert backend.adopt(NAME, short, adopted, 10, "{}", within()).place == 0
    assert 9 < backend.remaining(NAME, within()) <= 10
    assert backend.release(NAME, adopted, within())
    assert acquire(backend)[1]


def test_batches_that_share_keys_do_not_wait_for_each_other(postgres, in_production):
    postgres.query("TRUNCATE angee_jobs_tasklock, angee_jobs_lockmember")
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'angee_tests'"
    before = postgres.query(deadlocks)
    names = [f"angee:name:batch-{number}" for number in range(30)]

    def work(number):
        backend = TableLockBackend(alias="postgres")
        batch = [Extension(name, enter(backend, (SHARED, 8)[number % 2], name)[0], 30) for name in names]
        batch += [Extension(f"{name}-{number}", acquire(backend, f"{name}-{number}")[0], 30) for name in names[:5]]
        for turn in range(60):
            mine = batch[:: -1 if (turn + number) % 2 else 1]
            assert set(backend.extend(mine, within(20))) == {each.owner for each in mine}
        backend.close()

    in_threads(4, work)
    time.sleep(1.1)  # a session tells its counts once a second, or when it ends
    assert postgres.query(deadlocks) == before


def test_a_strangers_lock_of_the_gate_bounds_a_try(backend, postgres, monkeypatch):
    monkeypatch.setattr(table_postgres, "ROW_SECONDS", 0.3)
    owner, _ = enter(backend, 2)
    with postgres.connect() as stranger, stranger.transaction():
        stranger.execute("SELECT * FROM angee_jobs_tasklock FOR UPDATE")
        started = time.monotonic()
        with pytest.raises(LockBackendError, match="keeps the lock's row locked"):
            enter(backend, 2)  # there is room
        assert enter(backend, 1)[1] is None
        assert acquire(backend)[1] is None
        for call in (
            lambda: backend.release(NAME, owner, within()),
            lambda: backend.extend([Extension(NAME, owner, 30)], within()),
        ):
            with pytest.raises(LockBackendError) as caught:
                call()
            assert not caught.value.uncertain
        assert time.monotonic() - started < 5
    assert backend.release(NAME, owner, within())


def test_one_locked_gate_does_not_keep_others_from_renewal(backend, postgres, monkeypatch):
    monkeypatch.setattr(table_postgres, "ROW_SECONDS", 8.0)
    monkeypatch.setattr(table_postgres, "ROW_SHARE", 0.02)
    names = [f"angee:name:{number}" for number in range(12)]
    batch = [Extension(name, enter(backend, 2, name)[0], 60) for name in names[:8]]
    batch += [Extension(name, acquire(backend, name)[0], 60) for name in names[8:]]
    with postgres.connect() as stranger, stranger.transaction():
        stranger.execute("SELECT * FROM angee_jobs_tasklock WHERE name = %s FOR UPDATE", [names[3]])
        with pytest.raises(LockBackendError) as caught:
            backend.extend(batch, within(20))
    assert set(caught.value.extended) == {each.owner for each in batch} - {batch[3].owner}
    assert set(backend.extend(batch, within())) == {each.owner for each in batch}


def test_exclusive_holds_need_no_table_of_members(backend, postgres):
    """As between the new code and its migration. Who wants a place is told what to do."""
    postgres.query("ALTER TABLE angee_jobs_lockmember RENAME TO away")
    try:
        owner, grant = acquire(backend)
        assert grant and acquire(backend)[1] is None
        assert backend.remaining(NAME, within()) > 29
        assert backend.extend([Extension(NAME, owner, 30)], within()) == [owner]
        assert backend.release(NAME, owner, within())
        with pytest.raises(LockBackendError, match="migrate"):
            enter(backend, 2)
    finally:
        postgres.query("ALTER TABLE away RENAME TO angee_jobs_lockmember")
    assert enter(backend, 2)[1]


def test_a_scan_tells_of_each_hold_once(backend):
    for places in (2, 2, SHARED):
        enter(backend, places)
    acquire(backend, "angee:name:another")
    [rows] = backend.scan_held(["place", "holder"], within())
    expected = {(NAME, 0, "{}"), (NAME, 1, "{}"), (NAME, None, "{}"), ("angee:name:another", None, "{}")}
    assert len(rows) == 4
    assert set(rows) == expected
    assert {type(place) for _, place, _ in rows} == {int, type(None)}


def test_what_is_left_of_members_is_tidied(backend, postgres):
    for places in (2, 2, SHARED):
        enter(backend, places, ttl=0.05)
    gone, _ = enter(backend, 3)
    assert backend.release(NAME, gone, within())
    backend.remaining(NAME, within())
    eventually(lambda: len(list(backend.list_expired(0, within()))) == 3)
    assert backend.inspect_many([NAME], within()) == []
    assert sorted(str(each.place) for each in backend.list_expired(0, within())) == ["0", "1", "None"]
    assert backend.reap(3600, 100, within()) == 0
    assert backend.reap(0, 2, within()) == 2
    assert backend.reap(0, 100, within()) == 1
    for table in ("angee_jobs_tasklock", "angee_jobs_lockmember"):
        postgres.query(f"UPDATE {table} SET expires_at = expires_at - interval '70 seconds'")
    assert backend.reap(0, 100, within()) == 0
    assert both(postgres) == [[], []]
    last = enter(backend, 2)[1].fencing_token
    assert enter(backend, 2)[1].fencing_token > last


def test_a_gate_that_was_deleted_ends_its_members(backend, postgres):
    """By hand: an exclusive hold that came meanwhile is not disturbed by a renewal."""
    owner, _ = enter(backend, 2)
    postgres.query("DELETE FROM angee_jobs_tasklock")
    mine, grant = acquire(backend)
    assert grant
    assert list(backend.extend([Extension(NAME, owner, 30)], within())) == []
    backend.release(NAME, owner, within())
    assert backend.extend([Extension(NAME, mine, 30)], within()) == [mine]
    assert enter(backend, 2)[1] is None
    assert backend.release(NAME, mine, within())
