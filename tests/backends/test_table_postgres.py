"""The lock table on a real PostgreSQL: what the contract suite cannot see from outside."""

import itertools
import threading
import time

import pytest
from django.core.management import call_command

from angee_jobs.locks import clock
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.backends.table import postgres as table_postgres
from angee_jobs.locks.backends.table import postgres_sql as table_postgres_sql
from angee_jobs.locks.backends.table.postgres import PostgresTableLockBackend
from angee_jobs.locks.errors import LockBackendError
from angee_jobs.locks.keys import name_digest
from angee_jobs.locks.waiting import FALLBACK_SECONDS
from tests.support.pg_helpers import (
    Interrupt,
    alias_with,
    give_up,
    in_production,
    in_threads,
    interrupted_after,
    within,
)
from tests.support.servers import eventually

__all__ = ["in_production"]

NAME = "angee:name:table"
_owners = map("owner-{}".format, itertools.count())


@pytest.fixture(params=["postgres", "pgbouncer"])
def backend(request, postgres, in_production):
    if request.param == "pgbouncer":
        request.getfixturevalue("pgbouncer")
    yield from _backend(request.param, postgres)


@pytest.fixture
def direct(postgres, in_production):
    yield from _backend("postgres", postgres)


def _backend(alias, postgres):
    postgres.query("TRUNCATE angee_jobs_tasklock")
    backend = TableLockBackend(alias=alias)
    assert isinstance(backend, PostgresTableLockBackend)
    yield backend
    backend.stop_watching()
    backend.close()


def acquire(backend, name=NAME, ttl=30.0, owner=None, seconds=5.0):
    owner = owner or next(_owners)
    return owner, backend.acquire(name, owner, ttl, "{}", within(seconds))


def rows(postgres, columns="*"):
    return postgres.query(f"SELECT {columns} FROM angee_jobs_tasklock ORDER BY name")


# Rows.


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


# Other people's transactions.


def test_a_strangers_row_lock_bounds_a_try(backend, postgres, monkeypatch):
    assert int(table_postgres._patience(within(1.0))) <= 600  # an answer has time to arrive
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


# Removing.


def expired(backend, count):
    for number in range(count):
        acquire(backend, f"angee:name:{number}", ttl=0.01)
    time.sleep(0.05)


def test_two_reapers_count_each_row_once(backend, postgres):
    for _ in range(25):
        expired(backend, 60)
        acquire(backend, "angee:name:live")

        def reap(number):
            counts = iter(lambda: backend.reap(0, 7, within(20)), 0)
            return sum(counts)

        # A reaper may find no row that is not another one's just now, and stop; nobody counts twice.
        assert sum(in_threads(2, reap)) + sum(iter(lambda: backend.reap(0, 100, within()), 0)) == 60
        assert [record.name for record in backend.list_held(within())] == ["angee:name:live"]
        assert list(backend.list_expired(0, within())) == []
        backend.force_release("angee:name:live", within())


def test_reaping_minds_the_grace(backend):
    expired(backend, 3)
    assert backend.reap(60, 100, within()) == 0
    assert len(list(backend.list_expired(0, within()))) == 3
    assert list(backend.list_expired(60, within())) == []
    assert backend.reap(0, 2, within()) == 2
    assert backend.reap(0, 2, within()) == 1


def test_rows_leave_the_table(backend, postgres):
    expired(backend, 3)
    owner, _ = acquire(backend, "angee:name:freed")
    backend.release("angee:name:freed", owner, within())
    postgres.query("UPDATE angee_jobs_tasklock SET expires_at = now() - interval '2 minutes'")
    acquire(backend, "angee:name:kept")
    assert backend.reap(0, 100, within()) == 3  # the freed one was over before, and is not counted
    assert rows(postgres, "name") == [("angee:name:kept",)]


def test_the_backend_tidies_by_itself(backend, postgres):
    for number in range(30):
        owner, _ = acquire(backend, f"angee:name:{number}")
        backend.release(f"angee:name:{number}", owner, within())
    expired(backend, 40)
    postgres.query("UPDATE angee_jobs_tasklock SET expires_at = now() - interval '2 minutes' WHERE owner = ''")
    backend._until_tidy = 1
    owner, _ = acquire(backend, "angee:name:last")
    for _ in range(40):  # each looks at the rows after a random point
        backend._until_tidy = 1
        backend.release("angee:name:last", owner, within())
    assert len(rows(postgres)) < 30 + 40 + 1 - 15
    assert len(list(backend.list_expired(0, within()))) >= 40 - 30  # what a reap has to count stays


def test_100_000_holds_are_listed_without_a_long_transaction(direct, postgres):
    postgres.query(
        "INSERT INTO angee_jobs_tasklock SELECT encode(sha256(i::text::bytea), 'hex'), 'angee:name:' || i, 'x', '{}',"
        " now(), now() + interval '1 hour', i, NULL FROM generate_series(1, 100000) AS i"
    )
    held = direct.list_held(within())
    first = [next(held) for _ in range(1500)]
    open_transactions = (
        "SELECT count(*) FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    )
    eventually(lambda: postgres.query(open_transactions) == [(0,)])  # but for one of somebody else that ends just now
    assert len({record.name for record in first} | {record.name for record in held}) == 100_000


# Waiting.


def test_a_release_tells_only_those_who_wait(direct, postgres):
    with postgres.connect() as ear:
        ear.execute(f"LISTEN {table_postgres_sql.CHANNEL}")
        for name in (NAME, "angee:name:waited"):
            owner, _ = acquire(direct, name)
            if name != NAME:
                assert 25 < direct.remaining(name, within()) <= 30
            direct.release(name, owner, within())
        # They are heard in the order in which they were sent.
        assert [n.payload for n in ear.notifies(timeout=10, stop_after=1)] == [name_digest("angee:name:waited")]


@pytest.mark.parametrize("end", ["release", "force_release"])
def test_a_waiter_is_woken(backend, end):
    other = TableLockBackend(alias=backend.db_alias)
    try:
        for _ in range(10):
            owner, _ = acquire(other)
            assert backend.remaining(NAME, within())
            backend.wait_for_change(0.01)  # connects
            assert backend.remaining(NAME, within())
            arguments = (NAME, owner, within()) if end == "release" else (NAME, within())
            threading.Timer(0.1, getattr(other, end), arguments).start()
            started = time.monotonic()
            woken = list(backend.wait_for_change(5.0))
            assert woken == [NAME]
            assert time.monotonic() - started < 3
            assert backend.remaining(NAME, within()) is None
    finally:
        other.close()


def test_watching_stops_at_once_and_leaves_no_session(backend, postgres):
    others = len(postgres.sessions())
    for _ in range(5):
        acquire(backend)
        backend.remaining(NAME, within())
        backend.wait_for_change(0.01)
        thread = threading.Thread(target=lambda: backend.wait_for_change(20.0))
        thread.start()
        eventually(lambda: not backend.push or backend._listener._in_use.locked(), 10, "it listens")
        backend.stop_watching()
        thread.join(10)
        assert not thread.is_alive()
    backend.close()
    if backend.push:
        eventually(lambda: len(postgres.sessions()) <= others)


def test_a_lost_listening_session_is_replaced(direct, postgres):
    acquire(direct)
    direct.remaining(NAME, within())
    assert direct.wait_for_change(1) is None
    assert list(direct.wait_for_change(0.05)) == []
    for session in postgres.sessions():
        postgres.terminate(session.pid)
    answers = []
    for _ in range(3):
        try:
            answers.append(direct.wait_for_change(0.05))
        except LockBackendError:
            pass
    assert None in answers  # whatever was sent meanwhile was missed


def test_through_a_pooler_nothing_listens(postgres, pgbouncer, in_production):
    [backend] = _backend("pgbouncer", postgres)
    acquire(backend)
    assert backend.push is False
    backend.remaining(NAME, within())
    assert list(backend.wait_for_change(0.3)) == []
    assert postgres.query("SELECT waited_until FROM angee_jobs_tasklock WHERE owner <> ''") == [(None,)]
    backend.force_release(NAME, within())
    backend.close()


# A server that hangs, dies, or cannot be used.


def test_a_grant_that_came_too_late_is_given_up(backend, postgres):
    uncertain = 0
    for _ in range(15):
        with postgres.hanging():
            started = time.monotonic()
            with pytest.raises(LockBackendError) as caught:
                acquire(backend, owner="late", seconds=0.1)
            assert time.monotonic() - started < 2
            with pytest.raises(LockBackendError):
                backend.release(NAME, "late", within(0.1))
        give_up(backend, NAME, "late")
        assert backend.inspect(NAME, within()) is None
        time.sleep(0.02)
        assert backend.inspect(NAME, within()) is None
        uncertain += caught.value.uncertain
    assert uncertain


def test_deadlines_of_one_millisecond_leave_nothing(backend, postgres):
    granted = 0
    for number in range(1000):
        owner = f"short-{number}"
        try:
            granted += backend.acquire(NAME, owner, 30, "{}", within(0.001 * (number % 3))) is not None
        except LockBackendError:
            pass
        give_up(backend, NAME, owner)
    assert backend.inspect(NAME, within()) is None
    assert rows(postgres, "owner") in ([("",)], [])
    assert acquire(backend)[1]


def test_interrupts_in_mid_query_leave_nothing(backend, postgres):
    """As Celery's soft time limit does."""
    interrupts = 0
    for number in range(400):
        owner = f"struck-{number}"
        try:
            with interrupted_after(0.0001 + 0.00001 * (number % 150)):
                for _ in range(100):
                    acquire(backend, owner=owner)
                    backend.release(NAME, owner, within())
        except Interrupt:
            interrupts += 1
        give_up(backend, NAME, owner)
    assert interrupts > 100
    assert backend.inspect(NAME, within()) is None
    assert not [slot for slot in backend._pool.slots if slot.claimed]
    assert len(backend._pool.slots) <= 2 * table_postgres.SESSIONS


def test_a_signal_handler_may_use_locks_itself(backend):
    used = 0

    def handler():
        nonlocal used
        owner, grant = acquire(backend, "angee:name:handler")
        assert grant and backend.release("angee:name:handler", owner, within())
        used += 1

    for number in range(150):
        with interrupted_after(0.0002 + 0.00001 * (number % 100), handler):
            for _ in range(1000):  # until it strikes
                owner, grant = acquire(backend)
                assert grant and backend.release(NAME, owner, within())
                if used > number:
                    break
    assert used == 150
    assert not [slot for slot in backend._pool.slots if slot.claimed]


def test_sessions_that_died_while_idle_are_replaced(backend, postgres):
    owner, _ = acquire(backend)
    for how in (postgres.terminate_all, postgres.restart):
        how()
        assert backend.extend([Extension(NAME, owner, 30)], within()) == [owner]
    postgres.terminate_all()
    assert backend.release(NAME, owner, within())


def test_many_threads_use_a_few_sessions(direct, postgres):
    others = len(postgres.sessions())

    def work(number):
        for _ in range(20):
            owner, grant = acquire(direct, f"angee:name:{number}", seconds=20)
            assert grant and direct.release(f"angee:name:{number}", owner, within(20))

    in_threads(30, work)
    assert len(postgres.sessions()) <= others + table_postgres.SESSIONS


def test_no_server(postgres, in_production):
    with alias_with(PORT="1") as alias, pytest.raises(LockBackendError, match="cannot be connected to") as caught:
        acquire(TableLockBackend(alias=alias))
    assert not caught.value.uncertain


def test_without_the_migration_the_error_says_what_to_run(postgres, in_production):
    postgres.query("CREATE DATABASE bare", dbname="postgres")
    with alias_with(NAME="bare") as alias:
        backend = TableLockBackend(alias=alias)
        for verb in (lambda: acquire(backend), lambda: backend.inspect(NAME, within())):
            with pytest.raises(LockBackendError, match=f"manage.py migrate angee_jobs --database {alias}") as caught:
                verb()
            assert not caught.value.uncertain
        backend.close()
        postgres.query("DROP DATABASE bare", dbname="postgres")


def test_the_clock_of_the_server_decides(backend):
    started = clock.now()
    acquire(backend, ttl=0.3)
    eventually(lambda: acquire(backend)[1], timeout=5)
    assert clock.now() - started > 0.29
