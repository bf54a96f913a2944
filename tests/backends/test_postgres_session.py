"""Sessions with a real PostgreSQL, below the backends: connecting, deadlines, interrupts, forks, poolers."""

import contextlib
import os
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from angee_jobs.locks import clock, force_release, lock
from angee_jobs.locks.backends.postgres import pool as pg_pool
from angee_jobs.locks.backends.postgres import session as pg
from angee_jobs.locks.backends.postgres.pool import Pool
from angee_jobs.locks.backends.postgres.session import NoAnswer, Session, SessionLost, Statement
from angee_jobs.locks.errors import LockBackendError
from tests.support.pg_helpers import (
    Interrupt,
    alias_with,
    database_defaults,
    in_production,
    in_threads,
    interrupted_after,
    within,
)
from tests.support.procs import Child
from tests.support.servers import eventually

__all__ = ["in_production"]

ECHO = Statement("SELECT $1::text, pg_backend_pid()")
SLEEP = Statement("SELECT pg_sleep($1::float8), 'slept'")
WAIT = Statement("SELECT pg_advisory_xact_lock(7), 'waited'")


@pytest.fixture
def session(postgres):
    session = Session("postgres", within())
    yield session
    session.close()


@pytest.fixture
def pool(postgres, in_production):
    pool = Pool("postgres", 4)
    yield pool
    for slot in pool.slots:
        slot.drop()


@contextlib.contextmanager
def held_up(postgres):
    """Nobody who asks to WAIT gets an answer before the end of the block, or of the connection that it yields."""
    with postgres.connect() as stranger:
        stranger.execute("SELECT pg_advisory_lock(7)")
        yield stranger


def ended_in_mid_query(postgres, pid, stranger):
    """A thread that ends the session ``pid`` as soon as it WAITs, and then lets others have what it waited for."""

    def end():
        eventually(lambda: postgres.advisory_locks(granted=False), 10)
        postgres.terminate(pid)
        stranger.close()

    thread = threading.Thread(target=end)
    thread.start()
    return thread


# Connecting.


def test_a_direct_connection_is_told_from_a_pooled_one(postgres, pgbouncer, pgbouncer_session):
    with alias_with(HOST=str(pgbouncer_session.directory), PORT=str(pgbouncer_session.port)) as pooled:
        for alias, direct in (("postgres", True), ("pgbouncer", False), (pooled, False)):
            session = Session(alias, within())
            assert session.direct is direct
            assert session.execute(ECHO, ["it's $1"], within())[0][0] == b"it's $1"
            assert session.execute(ECHO, [None], within())[0][0] is None
            session.close()


@pytest.mark.parametrize("alias", ["postgres", "pgbouncer"])
def test_other_defaults_change_nothing(postgres, pgbouncer, alias):
    changes = {"default_transaction_isolation": "serializable", "statement_timeout": "400ms", "lock_timeout": "1ms"}
    if alias == "postgres":  # through a pooler nobody can make a statement of a read-only session write
        changes |= {"default_transaction_read_only": "on", "idle_session_timeout": "2s"}
    with database_defaults(postgres, **changes), alias_with(base=alias) as special:
        pgbouncer.restart()
        session = Session(special, within())
        assert session.execute(Statement("SHOW transaction_isolation"), [], within()) == [(b"read committed",)]
        assert session.execute(SLEEP, [0.5], within())[0][1] == b"slept"
        assert session.execute(Statement("SHOW idle_session_timeout"), [], within()) == [(b"0",)]
        assert session.look()
        session.close()
    pgbouncer.restart()


def test_nothing_of_ours_stays_with_the_server_behind_a_pooler(postgres, pgbouncer):
    session = Session("pgbouncer", within())
    session.execute(Statement("SELECT set_config('lock_timeout', '7', true)"), [], within())
    with pytest.raises(Exception, match="division by zero"):
        session.execute(Statement("SELECT 1 / 0"), [], within())
    with pgbouncer.connect() as other:
        for name in ("lock_timeout", "statement_timeout"):
            assert other.execute("SELECT current_setting(%s)", [name]).fetchone() == ("0",)
    assert session.execute(ECHO, ["on"], within())[0][0] == b"on"
    session.close()


def test_the_role_is_assumed(postgres, pgbouncer):
    postgres.query("DROP ROLE IF EXISTS somebody")
    postgres.query("CREATE ROLE somebody")
    for base in ("postgres", "pgbouncer"):
        with alias_with(base=base, OPTIONS={"assume_role": "somebody"}) as alias:
            session = Session(alias, within())
            assert session.execute(Statement("SELECT current_user"), [], within()) == [(b"somebody",)]
            session.close()
    assert pgbouncer.connect().execute("SELECT current_user").fetchone() == ("postgres",)


def test_a_service_and_a_password_made_for_the_moment(postgres, tmp_path, monkeypatch):
    (tmp_path / "services").write_text(
        f"[lockservice]\nhost={postgres.directory}\nport={postgres.port}\ndbname=angee_tests\nuser=postgres\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    calls = []

    def password():
        calls.append(1)
        return "secret"

    service = {
        "NAME": "",
        "HOST": "",
        "PORT": "",
        "USER": "",
        "OPTIONS": {"service": "lockservice", "password": password},
    }
    with alias_with(**service) as alias:
        for number in (1, 2):
            session = Session(alias, within())
            assert session.execute(ECHO, ["x"], within())
            assert len(calls) == number  # asked again for each connection
            session.close()


def test_what_django_keeps_among_the_options_is_not_libpqs(postgres):
    options = {"isolation_level": 4, "server_side_binding": True, "prepare_threshold": 3, "connect_timeout": 5}
    with alias_with(OPTIONS=options) as alias:
        Session(alias, within()).close()


def test_an_option_that_nobody_knows(postgres):
    with alias_with(OPTIONS={"colour": "blue"}) as alias, pytest.raises(ImproperlyConfigured, match="colour"):
        Session(alias, within())


def test_psycopg2_is_refused(postgres, monkeypatch):
    monkeypatch.setattr("django.db.backends.postgresql.psycopg_any.is_psycopg3", False)
    with pytest.raises(ImproperlyConfigured, match=r"psycopg 3.*psycopg2.*angee-jobs\[postgres\]"):
        Session("postgres", within())


def test_the_name_of_the_database_is_read_for_each_connection(postgres, in_production):
    """A test run changes it under a backend that exists already."""
    with alias_with() as alias:
        pool = Pool(alias, 1)
        assert pool.run(Statement("SELECT current_database()"), [], within()) == [(b"angee_tests",)]
        connections.settings[alias]["NAME"] = "postgres"
        assert pool.run(Statement("SELECT current_database()"), [], within()) == [(b"postgres",)]
        pool.close()


# Deadlines.


def test_connecting_has_a_deadline(postgres):
    before = set(pg._sessions)  # those of earlier tests
    with postgres.hanging():
        started = time.monotonic()
        with pytest.raises(NoAnswer) as caught:
            Session("postgres", within(0.3))
        assert 0.2 < time.monotonic() - started < 2.3
        assert not caught.value.sent
    assert not set(pg._sessions) - before


def test_an_answer_that_is_late_is_read_before_the_next_request(session, postgres):
    for _ in range(2):
        session.execute(WAIT, [], within())  # and is prepared now
    for _ in range(50):
        with held_up(postgres):
            with pytest.raises(NoAnswer) as caught:
                session.execute(WAIT, [], within(0.01))
            assert caught.value.sent
            assert session.busy
        assert session.execute(ECHO, ["next"], within())[0][0] == b"next"


def test_a_server_that_hangs(session, postgres):
    with postgres.hanging():
        for sent in (True, False, False):
            started = time.monotonic()
            with pytest.raises(NoAnswer) as caught:
                session.execute(ECHO, ["x" * 1_000_000], within(0.2))
            assert caught.value.sent is sent  # the later ones found the answer to the first one outstanding
            assert time.monotonic() - started < 2.2
    assert session.execute(ECHO, ["back"], within())[0][0] == b"back"


def test_thousands_of_deadlines_of_a_millisecond(session):
    late = 0
    for number in range(3000):
        try:
            if number % 50 == 0:  # late for certain, on however fast a machine
                session.execute(SLEEP, [0.02], within(0.001))
            assert session.execute(ECHO, [number], within(0.0001 * (number % 10)))[0][0] == str(number).encode()
        except NoAnswer:
            late += 1
    assert late > 20
    assert session.execute(ECHO, ["end"], within())[0][0] == b"end"


# Interrupts.


def test_interrupts_in_mid_query(session):
    struck = 0
    for number in range(500):
        try:
            with interrupted_after(0.0001 + 0.00001 * (number % 100)):
                for _ in range(50):
                    session.execute(ECHO, [number], within())
        except Interrupt:
            struck += 1
        assert session.execute(ECHO, [f"after {number}"], within())[0][0] == f"after {number}".encode()
    assert struck > 100


def test_a_signal_handler_may_use_the_same_session(session):
    inner = []

    def handler():
        inner.append(session.execute(ECHO, ["inner"], within())[0][0])

    for number in range(400):
        with interrupted_after(0.0001 + 0.00001 * (number % 100), handler):
            for at in range(2000):  # until it strikes
                answer = session.execute(ECHO, [f"{number}/{at}"], within())
                assert answer[0][0] == f"{number}/{at}".encode()
                if len(inner) > number:
                    break
    assert len(inner) == 400
    assert set(inner) == {b"inner"}


def test_a_claim_is_void_when_its_frame_is_gone(pool):
    slot = pool.slots[0]

    def forget():
        assert pg_pool.Claim(pool, slot).take()

    for _ in range(3):
        forget()
        assert not slot.claimed
        assert pool.claim(within()).slot is slot


# Connections that die.


def test_a_session_that_died_while_idle_is_found_dead_before_anything_is_sent(session, postgres):
    assert postgres.terminate(session.server_pid)
    with pytest.raises(SessionLost) as caught:
        session.execute(ECHO, ["x"], within())
    assert not caught.value.sent


def test_a_session_that_dies_in_mid_query(session, postgres):
    with held_up(postgres) as stranger:
        thread = ended_in_mid_query(postgres, session.server_pid, stranger)
        with pytest.raises(SessionLost) as caught:
            session.execute(WAIT, [], within(20))
        thread.join(10)
    assert caught.value.sent
    assert not session.open


def test_only_what_may_be_is_sent_twice(pool, postgres):
    for again in (True, False):
        pool.run(ECHO, ["x"], within())
        pid = pool.slots[0].session.server_pid
        with held_up(postgres) as stranger:
            thread = ended_in_mid_query(postgres, pid, stranger)
            if again:
                assert pool.run(WAIT, [], within(20), again=True)[0][1] == b"waited"
            else:
                with pytest.raises(LockBackendError) as caught:
                    pool.run(WAIT, [], within(20))
                assert caught.value.uncertain
                assert caught.value.__cause__ is not None
            thread.join(10)


def test_what_was_prepared_may_get_lost(pool):
    for _ in range(3):
        pool.run(ECHO, ["x"], within())
    pool.run(Statement("DEALLOCATE ALL"), [], within())
    assert pool.run(ECHO, ["y"], within())[0][0] == b"y"


def test_idle_sessions_are_closed(postgres, pool, monkeypatch):
    monkeypatch.setattr(pg_pool, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(pg_pool, "_janitor", pg_pool._Janitor())
    seen = threading.Event()  # before which the janitor does not begin
    sleep = time.sleep
    monkeypatch.setattr(pg_pool, "time", types.SimpleNamespace(sleep=lambda seconds: seen.wait(30) and sleep(seconds)))
    others = {each.pid for each in postgres.sessions()}
    in_threads(4, lambda number: pool.run(SLEEP, [0.1], within()))
    ours = {each.pid for each in postgres.sessions()} - others
    assert ours
    seen.set()
    eventually(lambda: not ours & {each.pid for each in postgres.sessions()}, 10)
    assert pool.run(ECHO, ["again"], within())


def test_in_a_test_run_sessions_are_closed_at_once(postgres):
    pool = Pool("postgres", 4)
    others = {each.pid for each in postgres.sessions()}
    in_threads(8, lambda number: pool.run(SLEEP, [0.05], within()))
    assert not any(slot.session for slot in pool.slots)
    eventually(lambda: {each.pid for each in postgres.sessions()} <= others, 10)


@pytest.mark.parametrize("backend", ["postgres_advisory", "postgres_table"])
def test_threads_that_ask_again_and_again_starve_no_other(postgres, in_production, backend):
    """They were back at the session before anybody woke up, and the others heard of a server that does not answer."""
    stop, rounds = threading.Event(), [0] * 3

    def hammer(number):
        while not stop.is_set():
            force_release("hammered", backend=backend)
            rounds[number] += 1

    with ThreadPoolExecutor(3) as elsewhere:
        hammers = [elsewhere.submit(hammer, number) for number in range(3)]
        try:
            delays = []
            for _ in range(100):
                started = clock.now()
                with lock("mine", backend=backend):
                    delays.append(clock.now() - started)
            eventually(lambda: all(rounds), 10)
        finally:
            stop.set()
        for each in hammers:
            each.result(20)
    assert max(delays) < 2.5


def test_a_pool_that_is_used_up_answers_in_time(pool, postgres):
    with held_up(postgres):
        threads = [threading.Thread(target=pool.run, args=[WAIT, [], within(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: all(slot.claimed for slot in pool.slots), 10)
        started = clock.now()
        with pytest.raises(LockBackendError) as caught:
            pool.run(ECHO, ["x"], within(0.2))
        assert clock.now() - started < 2.2
        assert not caught.value.uncertain
    for thread in threads:
        thread.join(20)


def test_a_release_waits_for_what_is_outstanding(pool, postgres):
    pool.run(ECHO, ["x"], within())  # connects
    with ThreadPoolExecutor(1) as elsewhere:
        with held_up(postgres):
            with pytest.raises(LockBackendError):
                pool.run(WAIT, [], within(0.1), owner="late")
            with pytest.raises(LockBackendError):
                pool.settle("late", within(0.05))
            pool.settle("another", within(0.05))
            settled = elsewhere.submit(pool.settle, "late", within(20))
            time.sleep(0.1)
            assert not settled.done()
        settled.result(20)
    assert not any(slot.session and slot.session.busy for slot in pool.slots)


# Forks.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_uses_nor_disturbs_the_session(session, postgres, pool):
    pool.run(ECHO, ["x"], within())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ours = pool.run(ECHO, ["child"], within())[0]
            session.close()
            os.write(write, b"%s %d" % (ours[0], session.open))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"child 0"
    os.close(read)
    os.close(write)
    assert session.execute(ECHO, ["parent"], within())[0][0] == b"parent"
    assert pool.run(ECHO, ["parent"], within())[0][0] == b"parent"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_server_sees_the_parents_death_although_a_child_lives(postgres):
    with Child("pg_fork") as child:
        pid = int(child.expect("session"))
        forked = int(child.expect("forked"))
        assert pid in [session.pid for session in postgres.sessions()]
        child.sigkill()
        eventually(lambda: pid not in [session.pid for session in postgres.sessions()])
        os.kill(forked, 0)  # still there
