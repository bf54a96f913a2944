"""Session locks on a real PostgreSQL: what the contract suite cannot see from outside."""

import contextlib
import itertools
import math
import os
import threading
import time

import pytest
from django.core.exceptions import ImproperlyConfigured

from angee_jobs.locks import clock
from angee_jobs.locks.backends.advisory import backend as advisory
from angee_jobs.locks.backends.advisory import session as pg_holds
from angee_jobs.locks.backends.advisory import sql as pg_advisory
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.advisory.sql import advisory_key, halves, marker_key
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.postgres.statements import Statement
from angee_jobs.locks.errors import LockBackendError
from tests.support.pg_helpers import (
    Interrupt,
    alias_with,
    database_defaults,
    give_up,
    in_production,
    in_threads,
    interrupted_after,
    within,
)
from tests.support.servers import eventually

__all__ = ["in_production"]

NAME = "angee:name:advisory"
_owners = map("owner-{}".format, itertools.count())


@pytest.fixture(params=["direct", "session pooling"])
def alias(request, postgres):
    if request.param == "direct":
        yield "postgres"
    else:
        server = request.getfixturevalue("pgbouncer_session")
        with alias_with(HOST=str(server.directory), PORT=str(server.port)) as alias:
            yield alias


@pytest.fixture
def backend(alias, in_production):
    yield from _backend(alias)


@pytest.fixture
def other(alias, in_production):
    """As another process would have it: with a session of its own."""
    yield from _backend(alias)


@pytest.fixture
def direct(postgres, in_production):
    yield from _backend("postgres")


def _backend(alias):
    backend = PostgresAdvisoryLockBackend(alias=alias)
    yield backend
    backend.stop_watching()
    backend._session.pool.slots[0].drop()


@pytest.fixture(autouse=True)
def _nothing_left(postgres):
    postgres.query("TRUNCATE angee_jobs_sessionhold")
    yield
    postgres.heal()
    eventually(lambda: postgres.advisory_locks() == 0)


def acquire(backend, name=NAME, owner=None, seconds=5.0):
    owner = owner or next(_owners)
    return owner, backend.acquire(name, owner, 30.0, '{"host": "h", "pid": 1}', within(seconds))


def watch(backend, *holds):
    """What the renewal thread does every second; the owners of the holds that are alive."""
    return set(backend.extend([Extension(name, owner, 30) for name, owner in holds], within()))


def locks(postgres):
    """The keys that are held on the server, in our space."""
    sql = "SELECT classid::bigint, objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
    return sorted(postgres.query(sql))


def session_of(backend):
    return backend._session.pool.slots[0].session


def wait_for_the_end_of_sessions(*backends):
    """Those that the server has ended: a pooler passes that on in its own time."""
    for session in map(session_of, backends):
        eventually(lambda session=session: session is None or not session.look(), 10)


# Keys.


def test_golden_keys():
    """Another release of this package, in another process, must mean the same lock."""
    assert advisory_key("angee:name:billing-run") == 9212507278987731242
    assert marker_key("angee:name:billing-run") == 7007666591921509187
    assert advisory_key("angee:record:messaging.Channel:42:sync") == 911205940149840930


def test_keys_use_all_64_bits(backend, postgres):
    names = [f"angee:name:{number}" for number in range(200)]
    keys = [advisory_key(name) for name in names]
    assert min(keys) < -(2**62)
    assert max(keys) > 2**62
    for name in names[:40]:
        acquire(backend, name)
    assert locks(postgres) == sorted(halves(key) for key in keys[:40])
    assert all(backend.inspect(name, within()) for name in names[:40])
    assert not any(backend.inspect(name, within()) for name in names[40:50])


def test_names_that_share_half_of_a_key_are_two_locks(backend, monkeypatch):
    keys = {"angee:name:a": 1 << 32 | 7, "angee:name:b": 2 << 32 | 7, "angee:name:c": -1, "angee:name:d": 2**63 - 1}
    monkeypatch.setattr(advisory, "advisory_key", keys.__getitem__)
    for name in keys:
        assert backend.inspect(name, within()) is None
        assert acquire(backend, name)[1]
    assert len(list(backend.list_held(within()))) == 4


# Holds.


def test_one_session_carries_all_holds(backend, other, postgres):
    before = len(postgres.sessions())
    holds = [(f"angee:name:{number}", acquire(backend, f"angee:name:{number}")[0]) for number in range(100)]
    assert len(postgres.sessions()) <= before + 1
    assert watch(backend, *holds) == {owner for _, owner in holds}
    assert all(acquire(other, name)[1] is None for name, _ in holds)
    assert all(backend.release(name, owner, within()) for name, owner in holds)
    assert not any(backend.release(name, owner, within()) for name, owner in holds)


def test_it_is_not_re_entrant(backend):
    owner, grant = acquire(backend)
    assert grant
    assert acquire(backend)[1] is None
    assert acquire(backend, owner=owner)[1] is None
    assert in_threads(5, lambda number: acquire(backend)[1]) == [None] * 5
    assert not backend.release(NAME, "somebody else", within())
    assert backend.release(NAME, owner, within())
    assert acquire(backend)[1]


def test_fencing_tokens_go_up_whatever_happens(backend, other, postgres):
    last = 0
    for round_ in range(4):
        for each in (backend, other):
            owner, grant = acquire(each)
            assert grant.fencing_token > last
            last = grant.fencing_token
            assert each.release(NAME, owner, within())
        if round_ == 1:
            postgres.query("TRUNCATE angee_jobs_tasklock, angee_jobs_sessionhold RESTART IDENTITY")
        if round_ == 2:
            postgres.kill()
            postgres.start()
            wait_for_the_end_of_sessions(backend, other)


def test_a_process_holds_only_so_many(direct, monkeypatch):
    monkeypatch.setattr(pg_holds, "MAX_HOLDS", 5)
    for number in range(5):
        acquire(direct, f"angee:name:{number}")
    with pytest.raises(LockBackendError, match=r"holds 5 session locks already.*TableLockBackend") as caught:
        acquire(direct)
    assert not caught.value.uncertain
    assert acquire(direct, "angee:name:1")[1] is None


def test_other_peoples_advisory_locks_are_not_shown(direct, postgres):
    with postgres.connect() as stranger, postgres.connect("postgres") as elsewhere:
        for statement in ("SELECT pg_advisory_lock(1)", "SELECT pg_advisory_lock(1, 2)"):
            stranger.execute(statement)
        elsewhere.execute("SELECT pg_advisory_lock(%s)", [advisory_key(NAME)])
        acquire(direct, "angee:name:mine")
        assert [record.name for record in direct.list_held(within())] == ["angee:name:mine"]
        assert direct.inspect(NAME, within()) is None
        stranger.execute("SELECT pg_advisory_lock(%s)", [advisory_key(NAME)])
        assert direct.inspect(NAME, within()) is not None  # as a try would say
        assert acquire(direct)[1] is None


# Loss.


@pytest.mark.parametrize("how", ["terminate_all", "restart", "kill"])
def test_the_death_of_the_session_ends_all_holds(backend, postgres, how):
    holds = [(f"angee:name:{number}", acquire(backend, f"angee:name:{number}")[0]) for number in range(5)]
    assert len(watch(backend, *holds)) == 5
    getattr(postgres, how)()
    postgres.start()
    eventually(lambda: not watch(backend, *holds), timeout=4)
    assert backend.release(*holds[0], within()) is False  # and no driver's error
    assert acquire(backend, holds[1][0])[1]
    assert not watch(backend, *holds)
    assert backend.release(*holds[1], within()) is False  # that one is another's by now
    assert backend.inspect(holds[1][0], within())


def test_an_idle_timeout_of_the_server_does_not_end_a_hold(postgres, in_production):
    with database_defaults(postgres, idle_session_timeout="1s"):
        for backend in _backend("postgres"):
            owner, _ = acquire(backend)
            time.sleep(1.1)
            assert watch(backend, (NAME, owner)) == {owner}
            assert backend.release(NAME, owner, within())


def test_the_servers_side_notices_a_host_that_vanished(server_dir, in_production):
    from tests.support.servers import PostgresServer, free_port

    with PostgresServer(server_dir, port=free_port(), tcp=True) as server:
        with alias_with(HOST="127.0.0.1", PORT=str(server.port)) as alias:
            from tests.conftest import migrate

            migrate(alias)
            for backend in _backend(alias):
                acquire(backend)
                session = session_of(backend)
                for name, value in pg_advisory.SERVER_SETTINGS.items():
                    [(setting,)] = session.execute(
                        Statement("SELECT setting FROM pg_settings WHERE name = $1"), [name], within()
                    )
                    assert setting == value.encode()


def test_a_server_that_hangs(backend, other, postgres):
    owner, _ = acquire(backend)
    kept, _ = acquire(backend, "angee:name:kept")
    with postgres.hanging():
        for call in (
            lambda: acquire(backend, "angee:name:new", owner="late", seconds=0.3),
            lambda: backend.release(NAME, owner, within(0.3)),
            lambda: backend.inspect("angee:name:third", within(0.3)),
        ):
            started = time.monotonic()
            with pytest.raises(LockBackendError):
                call()
            assert time.monotonic() - started < 2.3
        started = time.monotonic()
        assert watch(backend, ("angee:name:kept", kept)) == {kept}
        assert time.monotonic() - started < 3
    give_up(backend, "angee:name:new", "late")
    give_up(backend, NAME, owner)
    assert watch(backend, ("angee:name:kept", kept)) == {kept}  # nothing was dropped
    assert acquire(other, "angee:name:kept")[1] is None
    assert acquire(other)[1]
    assert locks(postgres) == sorted(halves(advisory_key(name)) for name in ("angee:name:kept", NAME))


# Deadlines and interrupts.


def believed(backend):
    return sorted(halves(entry.key) for entry in backend._session.entries.values())


def test_thousands_of_deadlines_of_a_millisecond(backend, postgres):
    kept, _ = acquire(backend, "angee:name:kept")
    late = 0
    for number in range(2000):
        name, owner = f"angee:name:{number % 7}", f"short-{number}"
        certain = number % 50 == 0  # late on however fast a machine
        try:
            with postgres.hanging() if certain else contextlib.nullcontext():
                backend.acquire(name, owner, 30, "{}", within(0.001 * (number % 4) / 3))
        except LockBackendError:
            late += 1
        give_up(backend, name, owner)
        if number % 100 == 0:
            assert locks(postgres) == believed(backend) == [halves(advisory_key("angee:name:kept"))]
    assert late >= 40
    assert locks(postgres) == believed(backend) == [halves(advisory_key("angee:name:kept"))]
    assert watch(backend, ("angee:name:kept", kept)) == {kept}


def test_hundreds_of_interrupts(backend, postgres):
    kept, _ = acquire(backend, "angee:name:kept")
    struck = 0
    for number in range(500):
        owner = f"struck-{number}"
        try:
            with interrupted_after(0.0001 + 0.00001 * (number % 120)):
                while True:
                    acquire(backend, owner=owner)
                    backend.release(NAME, owner, within())
        except Interrupt:
            struck += 1
        give_up(backend, NAME, owner)
        if number % 25 == 0:
            assert watch(backend, ("angee:name:kept", kept)) == {kept}
            assert locks(postgres) == believed(backend) == [halves(advisory_key("angee:name:kept"))]
    assert struck == 500
    watch(backend)
    assert locks(postgres) == believed(backend) == [halves(advisory_key("angee:name:kept"))]
    assert acquire(backend)[1]


def test_a_signal_handler_may_use_locks_itself(backend, postgres):
    used = 0

    def handler():
        nonlocal used
        owner, grant = acquire(backend, "angee:name:handler")
        assert grant
        assert backend.release("angee:name:handler", owner, within())
        assert acquire(backend, NAME)[1] is None or backend.force_release(NAME, within())
        used += 1

    for number in range(100):
        with interrupted_after(0.0002 + 0.00001 * number, handler):
            for _ in range(1000):  # until it strikes
                owner, grant = acquire(backend, "angee:name:outer")
                assert grant
                assert backend.release("angee:name:outer", owner, within())
                if used > number:
                    break
    assert used == 100
    assert locks(postgres) == believed(backend) == []


def test_strays_are_freed_and_missing_ones_told(backend, postgres):
    """Whatever brought them about."""
    owner, _ = acquire(backend)
    session = session_of(backend)
    session.execute(Statement("SELECT pg_advisory_lock(12345)"), [], within())
    session.execute(pg_advisory.UNLOCK, [advisory_key(NAME)], within())
    backend._session.doubtful = True
    assert watch(backend, (NAME, owner)) == set()
    assert locks(postgres) == []


def test_many_threads_share_the_session(backend, postgres):
    counts = [0] * 5

    def work(number):
        for _ in range(30):
            name = f"angee:name:{number % 5}"
            owner, grant = acquire(backend, name)
            if grant:
                before = counts[number % 5]
                time.sleep(0)
                counts[number % 5] = before + 1
                assert backend.release(name, owner, within())

    in_threads(20, work)
    assert locks(postgres) == believed(backend) == []


# Sessions on which nothing can be locked, or no token drawn.


def test_a_read_only_session_keeps_no_lock(postgres, pgbouncer_session, in_production):
    pooled = {"HOST": str(pgbouncer_session.directory), "PORT": str(pgbouncer_session.port)}
    with database_defaults(postgres, default_transaction_read_only="on"), alias_with(**pooled) as alias:
        pgbouncer_session.restart()
        for backend in _backend(alias):
            for _ in range(3):
                with pytest.raises(LockBackendError, match="read-only") as caught:
                    acquire(backend)
                assert not caught.value.uncertain
                assert locks(postgres) == believed(backend) == []
    pgbouncer_session.restart()


def test_without_the_sequence_no_lock_stays(postgres, in_production):
    postgres.query("CREATE DATABASE bare", dbname="postgres")
    with alias_with(NAME="bare") as alias:
        for backend in _backend(alias):
            with pytest.raises(LockBackendError, match=f"manage.py migrate angee_jobs --database {alias}"):
                acquire(backend)
            assert locks(postgres) == believed(backend) == []
    postgres.query("DROP DATABASE bare", dbname="postgres")


def test_a_sequence_that_may_not_be_used_leaves_no_lock(postgres, in_production):
    postgres.query("DROP ROLE IF EXISTS weak")
    postgres.query("CREATE ROLE weak LOGIN")
    with alias_with(USER="weak") as alias:
        for backend in _backend(alias):
            for _ in range(3):
                with pytest.raises(LockBackendError, match="permission denied"):
                    acquire(backend)
                assert locks(postgres) == believed(backend) == []


def test_another_engine_is_refused():
    with pytest.raises(ImproperlyConfigured, match=r"works on PostgreSQL.*sqlite"):
        PostgresAdvisoryLockBackend(alias="default")
    with pytest.raises(ImproperlyConfigured, match="no database 'nowhere'"):
        PostgresAdvisoryLockBackend(alias="nowhere")


def test_transaction_pooling_is_proven_and_refused(postgres, pgbouncer, in_production):
    for options in (
        {},
        {"server_round_robin": 1, "min_pool_size": 5},
        {"server_round_robin": 1, "min_pool_size": 2},
        {"default_pool_size": 1},
    ):
        pgbouncer.options |= options
        pgbouncer.prepare()
        pgbouncer.restart()
        for backend in _backend("pgbouncer"):
            for _ in range(3):
                with pytest.raises(LockBackendError, match=r"connects directly or through.*TableLockBackend"):
                    acquire(backend)
                assert locks(postgres) == []
        for name in options:
            del pgbouncer.options[name]
    pgbouncer.options["default_pool_size"] = 10
    pgbouncer.restart()


# Information.


def test_holders_are_published_after_a_second(backend, other, postgres):
    owner, grant = acquire(backend)
    entry = backend._session.entries[advisory_key(NAME)]
    entry.granted = clock.now() + 10  # however long the next lines take, it is young
    watch(backend, (NAME, owner))
    assert postgres.query("SELECT count(*) FROM angee_jobs_sessionhold") == [(0,)]
    young = other.inspect(NAME, within())
    assert (young.name, young.holder, young.expires_at) == (NAME, None, None)
    assert [record.name for record in other.list_held(within())] != [NAME]
    entry.granted = clock.now() - 1
    watch(backend, (NAME, owner))
    for record in (other.inspect(NAME, within()), *other.list_held(within()), backend.inspect(NAME, within())):
        assert record.name == NAME
        assert record.fencing_token == grant.fencing_token
        assert '"host"' in record.holder
        assert record.acquired_at == pytest.approx(grant.acquired_at, abs=0.001)
    assert backend.release(NAME, owner, within())
    assert postgres.query("SELECT count(*) FROM angee_jobs_sessionhold") == [(0,)]


def test_what_the_dead_have_published_goes_away(backend, other, postgres, monkeypatch):
    monkeypatch.setattr(pg_advisory, "PUBLISH_SECONDS", 0)
    for number in range(10):
        owner, _ = acquire(backend, f"angee:name:{number}")
    watch(backend, ("angee:name:9", owner))
    assert postgres.query("SELECT count(*) FROM angee_jobs_sessionhold") == [(10,)]
    postgres.terminate_all()
    wait_for_the_end_of_sessions(backend)
    assert list(other.list_held(within())) == []
    assert other.inspect("angee:name:1", within()) is None
    owner, _ = acquire(other)
    watch(other, (NAME, owner))
    assert postgres.query("SELECT name FROM angee_jobs_sessionhold") == [(NAME,)]
    postgres.terminate_all()
    wait_for_the_end_of_sessions(other)
    assert other.reap(0, 100, within()) == 0
    assert postgres.query("SELECT count(*) FROM angee_jobs_sessionhold") == [(0,)]


def test_a_note_that_cannot_be_removed_does_not_keep_the_lock(direct, postgres, monkeypatch):
    monkeypatch.setattr(pg_advisory, "PUBLISH_SECONDS", 0)
    owner, _ = acquire(direct)
    watch(direct, (NAME, owner))
    with postgres.connect() as stranger, stranger.transaction():
        stranger.execute("SELECT * FROM angee_jobs_sessionhold FOR UPDATE")
        assert direct.release(NAME, owner, within(2))
    owner, _ = acquire(direct)
    watch(direct, (NAME, owner))
    postgres.query("ALTER TABLE angee_jobs_sessionhold RENAME TO away")
    try:
        assert direct.release(NAME, owner, within(2))
        assert locks(postgres) == []
        owner, _ = acquire(direct)
        assert watch(direct, (NAME, owner)) == {owner}
        assert direct.release(NAME, owner, within(2))
    finally:
        postgres.query("ALTER TABLE away RENAME TO angee_jobs_sessionhold")


# By force.


def in_background(backend, stop):
    """The renewal thread of the other process."""
    while not stop.wait(0.1):
        watch(backend)


def test_force_asks_the_holder(backend, other, postgres):
    owner, grant = acquire(backend)
    kept, _ = acquire(backend, "angee:name:kept")
    stop = threading.Event()
    thread = threading.Thread(target=in_background, args=[backend, stop])
    thread.start()
    try:
        assert other.force_release(NAME, within()).name == NAME
    finally:
        stop.set()
        thread.join()
    assert watch(backend, (NAME, owner), ("angee:name:kept", kept)) == {kept}
    assert backend.release(NAME, owner, within()) is False
    assert acquire(other)[1].fencing_token > grant.fencing_token
    assert other.force_release("angee:name:free", within()) is None
    assert backend.force_release("angee:name:kept", within()).name == "angee:name:kept"
    assert watch(backend, ("angee:name:kept", kept)) == set()


def test_force_frees_no_later_hold_of_the_same_session(backend, postgres):
    """The hold that is to go is released, and taken again, between the look at it and the request."""
    owner, _ = acquire(backend)
    run, later = backend._session.run, []

    def interfere(*args, **kwargs):
        backend._session.run = run
        assert backend.release(NAME, owner, within())
        later.append(acquire(backend))
        return run(*args, **kwargs)

    backend._session.run = interfere
    assert backend.force_release(NAME, within()) is None
    [(owner, grant)] = later
    assert grant
    assert locks(postgres) == believed(backend) == [halves(advisory_key(NAME))]
    assert backend.release(NAME, owner, within())


def test_force_with_a_token_asks_only_for_that_hold(backend, other, postgres):
    owner, grant = acquire(other)
    stop = threading.Event()
    watcher = threading.Thread(target=in_background, args=[other, stop])
    watcher.start()
    try:
        assert backend.force_release(NAME, within(), grant.fencing_token - 1) is None
        assert locks(postgres) == [halves(advisory_key(NAME))]
        eventually(lambda: backend.inspect(NAME, within()).fencing_token == grant.fencing_token)
        assert backend.force_release(NAME, within(), grant.fencing_token - 1) is None
        assert backend.force_release(NAME, within(), grant.fencing_token).fencing_token == grant.fencing_token
        assert locks(postgres) == []
        assert not other.release(NAME, owner, within())
    finally:
        stop.set()
        watcher.join()


def test_a_holder_that_does_not_answer_loses_its_session(backend, other, monkeypatch):
    monkeypatch.setattr(advisory, "ASKED_SECONDS", 0.8)  # so that there is time for the last look
    names = [NAME, "angee:name:a", "angee:name:b"]
    holds = [(name, acquire(backend, name)[0]) for name in names]
    assert other.inspect(NAME, within())  # connects
    started = clock.now()
    with pytest.raises(LockBackendError, match="end_session"):
        other.force_release(NAME, within(2.3))
    assert clock.now() - started < 4.5
    pid, records = other.holds_beside(NAME, within())
    assert len(records) == 3
    assert other.end_session(NAME, pid + 1, within()) is False
    assert other.end_session(NAME, pid, within()) is True
    eventually(lambda: not watch(backend, *holds), timeout=4)
    eventually(lambda: other.holds_beside(NAME, within()) is None)


# Waiting.


def test_only_those_who_wait_are_told(direct, postgres):
    with postgres.connect() as ear, postgres.connect() as waiter:
        ear.execute(f"LISTEN {pg_advisory.CHANNEL}")
        waited = "angee:name:waited"
        waiter.execute("SELECT pg_advisory_lock_shared(%s)", [marker_key(waited)])
        for name in (NAME, waited):
            owner, _ = acquire(direct, name)
            direct.release(name, owner, within())
        # They are heard in the order in which they were sent.
        assert [n.payload for n in ear.notifies(timeout=10, stop_after=1)] == [str(advisory_key(waited))]


def test_a_waiter_is_woken(backend, other, postgres):
    for _ in range(10):
        owner, grant = acquire(backend)
        assert grant
        assert other.remaining(NAME, within()) is None
        other.wait_for_change(0.01)  # connects
        assert acquire(other)[1] is None
        release = threading.Timer(0.1, backend.release, [NAME, owner, within()])
        release.start()
        started = time.monotonic()
        assert list(other.wait_for_change(5.0)) == [NAME]
        assert time.monotonic() - started < 3
        release.join()
        mine, grant = acquire(other)
        assert grant
        assert other.release(NAME, mine, within())
    assert backend.remaining("angee:name:free", within()) is None
    owner, _ = acquire(backend, "angee:name:mine")
    assert backend.remaining("angee:name:mine", within()) == math.inf
    other.stop_watching()
    backend.stop_watching()
    backend.release("angee:name:mine", owner, within())
    assert watch(other) == set()
    assert watch(backend) == set()
    eventually(lambda: postgres.advisory_locks() == 0, 5, "the marks are gone too")


def test_the_mark_of_a_key_that_nobody_waits_for_goes(backend, other, postgres):
    owner, _ = acquire(backend)
    acquire(other, "angee:name:kept")
    for name in (NAME, "angee:name:second"):
        other.remaining(name, within())
    assert postgres.advisory_locks() == 4
    session, asked = other._session._marks[marker_key("angee:name:second")]
    other._session._marks[marker_key("angee:name:second")] = session, asked - pg_holds.MARK_SECONDS
    other.remaining(NAME, within())
    assert postgres.advisory_locks() == 3
    backend.release(NAME, owner, within())


def test_waiting_keeps_no_snapshot_and_writes_no_log(direct, postgres, in_production):
    [other] = [PostgresAdvisoryLockBackend(alias="postgres")]
    owner, _ = acquire(direct)
    size = postgres.log_size()
    stop = threading.Event()

    def wait():
        while not stop.is_set():
            other.remaining(NAME, within())
            acquire(other)
            other.wait_for_change(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        with postgres.connect() as holder:
            holder.execute("SET statement_timeout = '20s'")
            holder.execute("CREATE INDEX CONCURRENTLY advisory_test ON angee_jobs_tasklock (name)")
            holder.execute("DROP INDEX CONCURRENTLY advisory_test")
    finally:
        stop.set()
        thread.join(10)
        other.stop_watching()
        other._session.pool.slots[0].drop()
    assert direct.release(NAME, owner, within())
    # What is done now and then is the server's own, and a client that is gone is one of an earlier test.
    others = ("checkpoint", "autovacuum", "automatic", "could not send data to client", "connection to client lost")
    log = [line for line in postgres.log(size).splitlines() if not any(each in line for each in others)]
    assert log == []


# Processes.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_holds_of_its_own(direct, postgres):
    owner, _ = acquire(direct)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            refused = acquire(direct)[1] is None
            granted = acquire(direct, "angee:name:child")[1] is not None
            alive = watch(direct, (NAME, owner)) == set()
            os.write(write, b"%d%d%d" % (refused, granted, alive))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"111"
    os.close(read)
    os.close(write)
    assert watch(direct, (NAME, owner)) == {owner}
    eventually(lambda: acquire(direct, "angee:name:child")[1])  # the child's exit has freed it
    assert direct.release(NAME, owner, within())


def test_in_a_test_run_the_session_closes_with_its_last_hold(postgres):
    backend = PostgresAdvisoryLockBackend(alias="postgres")
    before = {each.pid for each in postgres.sessions()}
    holds = [(name, acquire(backend, name)[0]) for name in ("angee:name:a", "angee:name:b")]
    assert acquire(backend, "angee:name:a")[1] is None
    assert len({each.pid for each in postgres.sessions()} - before) == 1
    for name, owner in holds:
        assert backend.release(name, owner, within())
    eventually(lambda: {each.pid for each in postgres.sessions()} <= before, 10)
    backend.inspect(NAME, within())
    eventually(lambda: {each.pid for each in postgres.sessions()} <= before, 10)
