"""Fencing tokens on PostgreSQL go up whatever becomes of the sequence, the server or its clock."""

import contextlib
import itertools
from datetime import UTC, datetime

import pytest
from django.db import transaction

from angee_jobs.locks import lock
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.postgres.tokens import SEQUENCE
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.lock import Lock
from tests.conftest import migrate
from tests.support.pg_helpers import alias_with, give_up, in_production, in_threads, within
from tests.support.procs import faketime
from tests.support.servers import PostgresServer, free_port, postgres_programs, require

__all__ = ["in_production"]

NAME = "angee:name:tokens"
_owners = map("owner{}".format, itertools.count())

pytestmark = pytest.mark.usefixtures("needs_postgres", "in_production")


@pytest.fixture
def needs_postgres():
    require(PostgresServer.unavailable())


@pytest.fixture(params=[TableLockBackend, PostgresAdvisoryLockBackend])
def backend_class(request):
    return request.param


@pytest.fixture
def own_server(server_dir):
    """A server of the test's own, and its alias; ``own_server(**options)`` starts it."""
    with contextlib.ExitStack() as stack:

        def start(**options):
            server = stack.enter_context(PostgresServer(server_dir, port=free_port(), options=options))
            alias = stack.enter_context(alias_with("own", HOST=str(server.directory), PORT=str(server.port)))
            migrate(alias)
            return server, alias

        yield start


@contextlib.contextmanager
def made(backend_class, alias="postgres"):
    backend = backend_class(alias=alias)
    try:
        yield backend
    finally:
        backend.stop_watching()
        for slot in (
            backend._session.pool.slots if backend_class is PostgresAdvisoryLockBackend else backend._pool.slots
        ):
            slot.drop()


def token(backend, name=NAME, give_back=True):
    """The fencing token of a hold that is taken, and given back, now."""
    owner = next(_owners)
    grant = backend.acquire(name, owner, 30.0, "{}", within())
    assert grant
    if give_back:
        assert backend.release(name, owner, within())
    return grant.fencing_token


# The sequence.


def restart(server):
    server.query(f"ALTER SEQUENCE {SEQUENCE} RESTART")
    return "angee_tests"


def dump(server, *options):
    file = server.directory / "dump.sql"
    where = ["-h", server.directory, "-p", str(server.port), "-U", "postgres"]
    server.run(postgres_programs() / "pg_dump", *where, "-f", file, *options, "angee_tests")

    def restore():
        server.query("CREATE DATABASE restored", dbname="postgres")
        server.run(postgres_programs() / "psql", *where, "-q", "-f", file, "-d", "restored")
        return "restored"

    return restore


def cut_over(server):
    """Logical replication copies rows, and no sequences: those are as the migration has made them there."""
    server.query("CREATE DATABASE replica", dbname="postgres")
    with alias_with("replica", base="own", NAME="replica"):
        migrate("replica")
    return lambda: "replica"


FALLS_BACK = {
    "the sequence is restarted": lambda server: lambda: restart(server),
    "its definition is dumped and restored": lambda server: dump(server, "--schema-only"),
    "an older dump is restored": dump,
    "a replica takes over": cut_over,
}


@pytest.mark.parametrize("how", FALLS_BACK)
def test_a_sequence_that_fell_back_takes_no_token_back(own_server, backend_class, how):
    server, alias = own_server(fsync="off")
    go_back = FALLS_BACK[how](server)
    server.query(f"SELECT count(nextval('{SEQUENCE}')) FROM generate_series(1, 5000)")
    with made(backend_class, alias) as backend:
        earlier = token(backend)
    database = go_back()
    with alias_with("later", base="own", NAME=database), made(backend_class, "later") as backend:
        assert token(backend) > earlier


def test_the_only_holder_passes_its_guard_although_the_sequence_was_restarted(own_server, backend_class):
    server, alias = own_server(fsync="off")
    with made(backend_class, alias) as backend:
        for _ in range(2):
            with Lock("guarded", backend=backend) as held, transaction.atomic(using=alias), held.guard(using=alias):
                pass
            server.query(f"ALTER SEQUENCE {SEQUENCE} RESTART")


def test_a_refused_try_draws_no_token(postgres, backend_class):
    """Nor does a token that is drawn before its grant order anything."""
    position = f"SELECT last_value FROM {SEQUENCE}"
    with made(backend_class) as backend, made(backend_class) as other:
        token(backend, give_back=False)
        before = postgres.query(position)
        assert other.acquire(NAME, "refused", 30.0, "{}", within()) is None
        assert postgres.query(position) == before
        assert backend.force_release(NAME, within())


def test_a_role_that_may_only_draw_gets_tokens_too(postgres, backend_class):
    """As after GRANT USAGE ON ALL SEQUENCES: they rely on the clock alone."""
    with contextlib.suppress(Exception):
        postgres.query("DROP OWNED BY drawer")
    postgres.query("DROP ROLE IF EXISTS drawer")
    postgres.query("CREATE ROLE drawer LOGIN")
    postgres.query("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO drawer")
    postgres.query(f"GRANT USAGE ON SEQUENCE {SEQUENCE} TO drawer")
    try:
        with alias_with(USER="drawer") as alias, made(backend_class, alias) as backend:
            tokens = [token(backend) for _ in range(10)]
        assert tokens == sorted(set(tokens))
    finally:
        postgres.query("DROP OWNED BY drawer")
        postgres.query("DROP ROLE drawer")


# The server.


def test_a_crash_beside_200_sessions_takes_no_token_back(own_server, backend_class):
    """Each of them has logged 32 values that others draw, and the disk had not taken them yet."""
    server, alias = own_server(max_connections=300, wal_writer_delay="10s", fsync="off")
    drawn, logged = f"SELECT nextval('{SEQUENCE}')", f"SELECT log_cnt FROM {SEQUENCE}"
    with made(backend_class, alias) as backend, contextlib.ExitStack() as strangers:
        token(backend)
        server.query("CHECKPOINT")
        for _ in range(200):
            stranger = server.connect(autocommit=False)  # who never commits, and so never waits for the disk
            strangers.callback(stranger.close)
            while stranger.execute(drawn).fetchone() and stranger.execute(logged).fetchone() != (32,):
                pass
        owner = next(_owners)
        before = backend.acquire(NAME, owner, 30.0, "{}", within()).fencing_token
        server.kill()
        server.start()
        give_up(backend, NAME, owner)
        assert token(backend) > before


@pytest.mark.once
@pytest.mark.parametrize("backend", ["postgres_table", "postgres_advisory"])
def test_a_crash_of_the_server_takes_no_token_back_that_another_session_had_made_ready(postgres, backend):
    """A sequence logs values ahead. Whoever draws one of those does not wait until the log is on the disk.

    Found by the torture run (`python -m tests.torture`).
    """
    mine = lock("torture-token", ttl=2, backend=backend)
    assert mine.acquire()
    assert mine.release()
    drawn = "SELECT nextval('angee_jobs_fencing_token')"
    stranger = postgres.connect(autocommit=False)  # who never commits, and so never waits for the disk
    logged = "SELECT log_cnt FROM angee_jobs_fencing_token"
    while stranger.execute(drawn).fetchone() and stranger.execute(logged).fetchone() != (32,):
        pass
    assert mine.acquire()
    before = mine.fencing_token
    postgres.kill()
    stranger.close()
    postgres.start()
    again = lock("torture-token", ttl=30, backend=backend)
    assert again.acquire(timeout=20)  # a lease has survived the crash
    assert again.fencing_token > before
    again.release()


# The clock.


class ClockServer(PostgresServer):
    """Its wall clock is what the file ``clock`` says: an offset in seconds, or a moment that stays."""

    def argv(self):
        # Not in the environment of the tests: libfaketime must not be loaded before the server's user is set.
        environment = faketime(0) | {"FAKETIME_TIMESTAMP_FILE": self.clock, "FAKETIME_NO_CACHE": "1"}
        del environment["FAKETIME"]
        self.set_clock("+0s")
        return ["/usr/bin/env", *(f"{name}={value}" for name, value in environment.items()), *super().argv()]

    @property
    def clock(self):
        return self.directory / "clock"

    def set_clock(self, what):
        self.clock.write_text(what)


@pytest.fixture
def clock_server(server_dir):
    if faketime(0) is None:
        pytest.skip("needs libfaketime")
    with ClockServer(server_dir, port=free_port(), options={"fsync": "off"}) as server:
        with alias_with("own", HOST=str(server.directory), PORT=str(server.port)) as alias:
            migrate(alias)
            yield server, alias


def test_a_clock_that_steps_back_takes_no_token_back(clock_server, backend_class):
    server, alias = clock_server
    with made(backend_class, alias) as one, made(backend_class, alias) as two:
        tokens = []
        for offset in (0, -3600, 0, -1, 7200, 0):
            server.set_clock(f"{offset:+d}s")
            for _ in range(3):
                tokens += [token(one), token(two)]
                server.query("TRUNCATE angee_jobs_tasklock")  # not even the row remembers
        assert tokens == sorted(set(tokens))


def test_two_grants_in_one_microsecond_have_two_tokens(clock_server, backend_class):
    server, alias = clock_server
    with made(backend_class, alias) as one, made(backend_class, alias) as two:
        token(one), token(two)
        server.set_clock("2035-01-01 12:00:00")
        tokens = [token(backend) for _ in range(5) for backend in (one, two)]
        assert server.query("SELECT clock_timestamp()") == server.query("SELECT clock_timestamp()"), "it stands still"
        assert tokens == sorted(set(tokens))
        assert tokens[-1] - tokens[0] < 1000
        assert tokens[0] > datetime(2034, 12, 31, tzinfo=UTC).timestamp() * 10**6


def test_tokens_of_a_key_go_up_for_many_sessions_at_once(postgres, backend_class):
    tokens = []

    def work(number):
        with made(backend_class) as backend:
            for turn in range(60):
                owner, name = f"{number}x{turn}", f"{NAME}{turn % 3}"
                grant = backend.acquire(name, owner, 30.0, "{}", within(20))
                if grant:
                    tokens.append((name, grant.fencing_token))  # in the order of the grants, since it is held
                    assert backend.release(name, owner, within(20))

    in_threads(8, work)
    assert len(tokens) > 30
    for name in {name for name, _ in tokens}:
        mine = [each for key, each in tokens if key == name]
        assert mine == sorted(set(mine))
