"""The lock table on a real PostgreSQL: rows, and other people's transactions."""

import time

import pytest
from django.core.management import call_command

from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.backends.table import postgres as table_postgres
from angee_jobs.locks.backends.table import postgres_sql as table_postgres_sql
from angee_jobs.locks.errors import LockBackendError
from angee_jobs.locks.waiting import FALLBACK_SECONDS
from tests.support.pg_helpers import (
    in_production,
    within,
)
from tests.support.pg_table import NAME, _owners, acquire, backend, direct, rows
from tests.support.servers import eventually

__all__ = ["backend", "direct", "in_production"]


def test_the_owner_id_is_stored_as_a_hash_only(backend, postgres):
    owner, _ = acquire(backend)
    assert owner not in str(rows(postgres))


def test_a_refused_try_writes_nothing(backend, postgres):
    acquire(backend)
    before = rows(postgres, "xmin, xmax, ctid")
    assert [acquire(backend)[1] for _ in range(20)] == [None] * 20
    assert rows(postgres, "xmin, xmax, ctid") == before


def test_of_many_who_were_waiting_one_goes_on_to_write(backend, postgres):
    """Those who come later neither wait for its row nor write anything."""

    def acquire_next():
        owner = next(_owners)
        return owner, backend.acquire_next(NAME, owner, 30.0, "{}", within())

    owner, grant = acquire_next()
    assert grant, "there is no row yet"
    before = rows(postgres, "xmin, xmax, ctid")
    assert acquire_next()[1] is None, "it is held"
    assert rows(postgres, "xmin, xmax, ctid") == before
    assert backend.release(NAME, owner, within())

    with postgres.connect() as winner, winner.transaction():
        winner.execute("SELECT FROM angee_jobs_tasklock FOR UPDATE")
        before = rows(postgres, "xmin, xmax, ctid")
        started = time.monotonic()
        assert [acquire_next()[1] for _ in range(5)] == [None] * 5
        assert time.monotonic() - started < 5 * table_postgres.ROW_SECONDS
        assert rows(postgres, "xmin, xmax, ctid") == before

    owner, grant = acquire_next()
    assert grant, "it is free"
    again = backend.acquire_next(NAME, owner, 30.0, "{}", within())
    assert again.fencing_token > grant.fencing_token, "the same owner may ask twice"
    postgres.query("UPDATE angee_jobs_tasklock SET expires_at = now()")
    assert acquire_next()[1].fencing_token > again.fencing_token, "it is over"


def test_whoever_looks_again_does_not_write_each_time(direct, postgres):
    acquire(direct)
    assert 29 < direct.remaining(NAME, within()) <= 30
    before = rows(postgres, "xmin, xmax, ctid")
    for _ in range(5):
        assert 25 < direct.remaining(NAME, within()) <= 30
    assert rows(postgres, "xmin, xmax, ctid") == before
    postgres.query("UPDATE angee_jobs_tasklock SET waited_until = now() + interval '1 second'")
    direct.remaining(NAME, within())
    [(left,)] = rows(postgres, "extract(epoch FROM waited_until - now())")
    assert left > max(table_postgres_sql.WAITED_ANEW, FALLBACK_SECONDS), "it lasts until the next look"


def test_those_who_still_wait_are_told_of_the_next_release_too(direct):
    owner, _ = acquire(direct)
    direct.remaining(NAME, within())
    assert direct.wait_for_change(1) is None  # now it listens
    for _ in range(3):
        assert direct.release(NAME, owner, within())
        assert list(direct.wait_for_change(5)) == [NAME]
        owner, grant = acquire(direct)  # somebody was quicker, and who waits has not looked again
        assert grant


def test_updates_stay_on_their_page(direct, postgres):
    postgres.query("SELECT pg_stat_reset_single_table_counters('angee_jobs_tasklock'::regclass)")
    for _ in range(500):
        owner, grant = acquire(direct)
        direct.extend([Extension(NAME, owner, 40)], within())
        assert grant and direct.release(NAME, owner, within())
    direct.close()
    # The session reports its counts when it ends.
    sql = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'angee_jobs_tasklock'"
    [(updates, hot)] = eventually(lambda: [row for row in postgres.query(sql) if row[0] >= 1400], 10)
    assert hot / updates > 0.95


def test_the_same_owner_may_ask_twice(backend):
    """As after a connection that died before the answer."""
    owner, first = acquire(backend)
    _, second = acquire(backend, owner=owner)
    assert second.fencing_token > first.fencing_token
    assert backend.release(NAME, owner, within())


def test_a_request_that_a_middlebox_delivers_late_holds_the_key_for_its_ttl_at_most(backend):
    """For the server it is the request of an owner that has asked before, and released since."""
    late, grant = acquire(backend, ttl=0.5)
    assert grant and backend.release(NAME, late, within())
    owner, grant = acquire(backend)
    assert acquire(backend, owner=late, ttl=0.5)[1] is None, "another holds it"
    assert list(backend.extend([Extension(NAME, late, 30)], within())) == []
    assert backend.release(NAME, late, within()) is False
    assert backend.inspect(NAME, within()).fencing_token == grant.fencing_token
    assert backend.release(NAME, owner, within())
    assert acquire(backend, owner=late, ttl=0.5)[1], "it is free"
    eventually(lambda: acquire(backend)[1])
    assert backend.force_release(NAME, within())


def test_fencing_tokens_go_up_whatever_becomes_of_the_row(backend, postgres):
    last = 0

    def next_token():
        nonlocal last
        owner, grant = acquire(backend)
        assert grant.fencing_token > last
        last = grant.fencing_token
        return owner

    for ending in (
        lambda owner: backend.release(NAME, owner, within()),
        lambda owner: backend.force_release(NAME, within()),
        lambda owner: postgres.query("UPDATE angee_jobs_tasklock SET expires_at = now()"),
        lambda owner: postgres.query("DELETE FROM angee_jobs_tasklock"),
        lambda owner: postgres.query("TRUNCATE angee_jobs_tasklock RESTART IDENTITY"),
        lambda owner: call_command("flush", database="postgres", interactive=False, verbosity=0),
        lambda owner: postgres.restart("immediate"),
        lambda owner: backend.release(NAME, owner, within()),
    ):
        ending(next_token())
        if backend.inspect(NAME, within()):
            backend.force_release(NAME, within())
    # The row knows better than a sequence that was set back.
    [(position,)] = postgres.query("SELECT last_value FROM angee_jobs_fencing_token")
    postgres.query("ALTER SEQUENCE angee_jobs_fencing_token RESTART WITH 1000")
    try:
        next_token()
    finally:
        postgres.query("SELECT setval('angee_jobs_fencing_token', %s)", [position + 1000])


def test_a_grant_survives_a_crash_of_the_server(direct, postgres):
    for _ in range(5):
        _, grant = acquire(direct)
        postgres.kill()
        postgres.start()
        assert direct.inspect(NAME, within()).fencing_token == grant.fencing_token
        assert direct.force_release(NAME, within())


@pytest.mark.once
def test_a_crash_of_the_server_does_not_take_an_extension_back(postgres, in_production):
    """The holder was told that it has ten minutes: so it has, although the server crashed right after it said so.

    Found by the torture run (`python -m tests.torture`).
    """
    postgres.query("TRUNCATE angee_jobs_tasklock")
    backend = TableLockBackend(alias="postgres")
    assert backend.acquire(NAME, "owner", 5.0, "{}", within())
    assert backend.extend([Extension(NAME, "owner", 600.0)], within()) == ["owner"]
    postgres.kill()
    postgres.start()
    record = backend.inspect(NAME, within())
    assert record is not None
    assert record.expires_in > 500
    backend.release(NAME, "owner", within())
    backend.close()


def test_a_strangers_row_lock_bounds_a_try(backend, postgres, monkeypatch):
    assert int(table_postgres._row_timeout(within(1.0))) <= 600  # an answer has time to arrive
    monkeypatch.setattr(table_postgres, "ROW_SECONDS", 0.3)
    owner, _ = acquire(backend)
    with postgres.connect() as stranger, stranger.transaction():
        stranger.execute("SELECT * FROM angee_jobs_tasklock FOR UPDATE")
        started = time.monotonic()
        assert acquire(backend)[1] is None
        assert time.monotonic() - started < 3  # a live row refuses without waiting
        with pytest.raises(LockBackendError) as caught:
            backend.release(NAME, owner, within())
        assert not caught.value.uncertain
        assert time.monotonic() - started < 3
    assert backend.release(NAME, owner, within())
    with postgres.connect() as stranger, stranger.transaction():
        stranger.execute("SELECT * FROM angee_jobs_tasklock FOR UPDATE")
        with pytest.raises(LockBackendError, match="keeps the lock's row locked"):
            acquire(backend)
    assert acquire(backend)[1]


def test_a_strangers_uncommitted_insert_bounds_a_try(backend, postgres):
    columns = "digest, name, owner, holder, acquired_at, expires_at, fencing_token"
    acquire(backend)
    with postgres.connect() as stranger:
        with stranger.transaction():
            stranger.execute("CREATE TEMP TABLE copy AS SELECT * FROM angee_jobs_tasklock")
            stranger.execute("DELETE FROM angee_jobs_tasklock")
        with stranger.transaction():
            stranger.execute(f"INSERT INTO angee_jobs_tasklock ({columns}) SELECT {columns} FROM copy")
            with pytest.raises(LockBackendError):
                acquire(backend, seconds=0.6)
    assert acquire(backend)[1] is None


def test_one_locked_row_does_not_keep_others_from_renewal(backend, postgres, monkeypatch):
    # Little time for the row's lock, and much for each answer.
    monkeypatch.setattr(table_postgres, "ROW_SECONDS", 8.0)
    monkeypatch.setattr(table_postgres, "ROW_SHARE", 0.02)
    names = [f"angee:name:{number}" for number in range(20)]
    batch = [Extension(name, acquire(backend, name)[0], 60) for name in names]
    with postgres.connect() as stranger, stranger.transaction():
        stranger.execute("SELECT * FROM angee_jobs_tasklock WHERE name = %s FOR UPDATE", [names[7]])
        with pytest.raises(LockBackendError) as caught:
            backend.extend(batch, within(20))
    assert set(caught.value.extended) == {each.owner for each in batch} - {batch[7].owner}
    assert set(backend.extend(batch, within())) == {each.owner for each in batch}


def test_an_answer_that_is_late_takes_back_no_renewal_beside_a_locked_row(backend, postgres, monkeypatch):
    names = [f"angee:name:{number}" for number in range(5)]
    batch = [Extension(name, acquire(backend, name)[0], 60) for name in names]
    real = backend.extend

    def extend(extensions, deadline):
        if [each.name for each in extensions] == [names[3]]:
            raise LockBackendError("no answer in time")
        return real(extensions, deadline)

    monkeypatch.setattr(backend, "extend", extend)
    with postgres.connect() as stranger, stranger.transaction():
        stranger.execute("SELECT * FROM angee_jobs_tasklock WHERE name = %s FOR UPDATE", [names[1]])
        with pytest.raises(LockBackendError) as caught:
            backend.extend(batch, within(20))
    assert set(caught.value.extended) == {batch[number].owner for number in (0, 2, 4)}


def test_renewal_never_shortens(backend):
    owner, grant = acquire(backend, ttl=100)
    assert backend.extend([Extension(NAME, owner, 1)], within()) == [owner]
    assert backend.inspect(NAME, within()).expires_at == pytest.approx(grant.expires_at, abs=0.001)
