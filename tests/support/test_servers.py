"""The suite's own tools do what the tests that use them rely on."""

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.procs import Child, ChildError, eventually, faketime
from tests.support.servers import PostgresServer, RespServer, require

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.once


# Children


def test_a_child_talks_and_ends():
    with Child("echo", "one", 2) as child:
        assert child.expect("ready", timeout=20) == f"{child.pid} one 2"
        child.send("something", "said")
        assert child.expect("heard") == "something said"
        child.send("end")
        child.expect("bye")
        assert child.wait() == 0


def test_a_child_runs_under_the_settings_and_directory_of_the_tests():
    with Child("echo:where") as child:
        assert child.line(20) == f"tests.settings {os.environ['ANGEE_JOBS_TEST_DIR']}/default.sqlite3"


def test_a_failing_child_shows_its_standard_error():
    with Child("echo:fail") as child, pytest.raises(ChildError, match=r"ended with code 1(.|\n)*on purpose"):
        child.expect("anything", timeout=20)


def test_a_child_that_says_something_else_is_a_failure():
    with Child("echo") as child, pytest.raises(ChildError, match="said 'ready"):
        child.expect("acquired", timeout=20)


def test_a_stopped_child_is_silent_and_goes_on():
    with Child("echo") as child:
        child.expect("ready", timeout=20)
        child.sigstop()
        child.send("x")
        child.silent(0.1)
        child.sigcont()
        child.expect("heard")


def test_a_killed_child_ends_at_once():
    with Child("echo") as child:
        child.expect("ready", timeout=20)
        child.sigkill()
        assert child.wait() == -9


def test_no_process_outlives_a_child():
    with Child("echo:fork") as child:
        orphan = int(child.expect("forked", timeout=20))
        assert child.wait() == 0
        os.kill(orphan, 0)
    eventually(lambda: gone(orphan))


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_child_can_have_a_wrong_clock_and_keeps_its_monotonic_one(hours: int):
    environment = faketime(hours * 3600)
    require(None if environment else "needs libfaketime (a package of the system)")
    with Child("echo:clocks", env=environment) as child:
        wall, monotonic = map(float, child.line(20).split())
        assert wall - time.time() == pytest.approx(hours * 3600, abs=30)
        assert monotonic == pytest.approx(time.monotonic(), abs=30)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/status")
    try:
        return status.exists() and "State:\tZ" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


# PostgreSQL


def test_postgres_answers_and_outlives_its_processes(postgres: PostgresServer):
    assert postgres.query("SELECT 1 + 1") == [(2,)]
    assert postgres.query("SHOW fsync") == [("off",)]
    assert postgres.query("SHOW synchronous_commit") == [("on",)]


def test_postgres_counts_and_ends_the_sessions_of_others(postgres: PostgresServer):
    eventually(lambda: postgres.advisory_locks() == 0, what="earlier tests have left nothing")
    with postgres.connect(application_name="someone") as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        assert [s.pid for s in postgres.sessions("someone")] == [connection.info.backend_pid]
        assert postgres.advisory_locks() == 1
        assert postgres.terminate(connection.info.backend_pid)
        assert postgres.sessions("someone") == []
        assert postgres.advisory_locks() == 0


def test_a_paused_postgres_hangs_and_goes_on(postgres: PostgresServer):
    import psycopg

    with postgres.connect(application_name="someone") as connection:
        with postgres.hanging():
            connection.pgconn.send_query(b"SELECT 1")
            with pytest.raises(psycopg.OperationalError):
                postgres.connect(connect_timeout=2)
        assert connection.pgconn.get_result().get_value(0, 0) == b"1"
        assert connection.pgconn.get_result() is None
    assert postgres.query("SELECT 1") == [(1,)]


@pytest.mark.parametrize("how", ["fast", "immediate", "kill"])
def test_postgres_ends_and_comes_back_with_its_data(postgres: PostgresServer, how: str):
    import psycopg

    postgres.query("CREATE TABLE kept (n int)")
    postgres.query("INSERT INTO kept VALUES (7)")
    with postgres.connect() as connection:
        if how == "kill":
            postgres.kill()
        else:
            postgres.stop(how)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError):
            postgres.connect()
    postgres.start()
    assert postgres.query("SELECT n FROM kept") == [(7,)]
    postgres.query("DROP TABLE kept")


def test_a_postgres_that_was_left_broken_is_repaired(postgres: PostgresServer):
    postgres.pause()
    postgres.heal()
    postgres.kill()
    postgres.heal()
    assert postgres.query("SELECT 1") == [(1,)]


def test_the_exit_of_a_forked_process_leaves_the_servers_and_files_alone(postgres: PostgresServer):
    if (pid := os.fork()) == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(pid, 0)
    assert postgres.query("SELECT 1") == [(1,)]
    assert os.path.isdir(os.environ["ANGEE_JOBS_TEST_DIR"])


# PgBouncer


def test_transaction_pooling_hands_one_session_to_two_clients(pgbouncer):
    with pgbouncer.connect() as one, pgbouncer.connect() as two:
        pids = {c.execute("SELECT pg_backend_pid()").fetchone() for c in (one, two, one, two)}
        assert len(pids) == 1
        with one.transaction(), two.transaction():
            assert (
                one.execute("SELECT pg_backend_pid()").fetchone() != two.execute("SELECT pg_backend_pid()").fetchone()
            )


def test_session_pooling_keeps_sessions_apart(pgbouncer_session):
    with pgbouncer_session.connect() as one, pgbouncer_session.connect() as two:
        assert one.execute("SELECT pg_backend_pid()").fetchone() != two.execute("SELECT pg_backend_pid()").fetchone()


def test_django_reaches_postgres_directly_and_pooled(pgbouncer):
    from django.db import connections

    for alias in ("postgres", "pgbouncer"):
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM django_migrations")
            assert cursor.fetchone()[0] > 0


# Valkey and Redis


@pytest.fixture(params=["valkey", "redis7"])
def resp(request) -> RespServer:
    return request.getfixturevalue(request.param)


def test_a_resp_server_pauses_is_killed_and_comes_back(resp: RespServer):
    import redis

    with resp.connect(client_name="someone") as client:
        client.set("a", "b")
        names = [entry["name"] for entry in resp.clients()]  # locks of tests before may have idle connections here
        assert names.count("someone") == 1
        with resp.hanging(), resp.connect(socket_timeout=0.1) as impatient, pytest.raises(redis.TimeoutError):
            impatient.ping()
        assert client.get("a") == b"b"
        assert resp.terminate_all() >= 1
        assert "someone" not in [entry["name"] for entry in resp.clients()]
        for end in (resp.kill, resp.stop):
            end()
            with pytest.raises(redis.ConnectionError):
                client.ping()
            resp.start()
        assert client.get("a") is None


def test_the_wheel_and_the_system_give_the_servers_that_are_claimed(valkey, redis7):
    assert valkey.version().startswith("9.")
    assert redis7.version().split(".")[0] >= "7"


def test_django_reaches_valkey_as_a_cache(valkey):
    from django.core.cache import caches

    caches["redis"].set("x", 1)
    assert caches["redis"].get("x") == 1


# No orphans


@pytest.mark.skipif(sys.platform != "linux", reason="servers die with the tests on Linux only")
@pytest.mark.parametrize("paused", [False, True])
def test_servers_die_with_the_tests(postgres: PostgresServer, valkey, server_dir: Path, paused: bool):
    """A crash of the test process leaves no server behind, not even a paused one."""
    code = (
        "import sys, time; from tests.support.servers import PostgresServer, ValkeyServer\n"
        "pg, vk = PostgresServer(sys.argv[1] + '/p', port=54330), ValkeyServer(sys.argv[1] + '/v')\n"
        "pg.start(); vk.start()\n"
        f"{'pg.pause(); vk.pause()' if paused else ''}\n"
        "print(*(p.pid for s in (pg, vk) for p in s._tree()), flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(server_dir)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) > 2
    finally:
        process.kill()
        process.communicate(timeout=10)
    eventually(lambda: all(gone(pid) for pid in pids), timeout=20, what="all servers end")
