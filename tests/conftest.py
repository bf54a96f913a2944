"""The suite's ground: a directory of its own, Django set up in it, and servers that start when a test asks.

Fixtures: `postgres`, `pgbouncer`, `pgbouncer_session`, `valkey`, `redis7` give a running server and repair
it after a test that broke it; `server_dir` is a place for a server of the test's own. Without a server's
packages a test skips and says why; with ANGEE_JOBS_REQUIRE_SERVERS in the environment (as in CI) it fails.
"""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
import pytest

from tests.support.servers import (
    PgBouncer,
    PostgresServer,
    RedisServer,
    RespServer,
    Server,
    ValkeyServer,
    at_exit,
    missing_packages,
    require,
)

# What nohup or a shell's background starts ignores some of these, and so would all that the tests start and signal.
for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

# Before the settings are read. In /tmp, because the path of a Unix socket may have only about 100 characters.
TEST_DIR = Path(tempfile.mkdtemp(prefix="angee-", dir="/tmp" if os.path.isdir("/tmp") else None))
at_exit(shutil.rmtree, TEST_DIR, ignore_errors=True)
TEST_DIR.chmod(0o711)  # servers that refuse to run as root find their folders in it
os.environ["ANGEE_JOBS_TEST_DIR"] = str(TEST_DIR)
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
django.setup()

from django.conf import settings  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connections  # noqa: E402
from django.test.utils import setup_test_environment, teardown_test_environment  # noqa: E402
from hypothesis import settings as hypothesis_settings  # noqa: E402

#: For `--hypothesis-profile=thorough`: a search for new failures, of which the suite makes a short one.
hypothesis_settings.register_profile("thorough", max_examples=400, stateful_step_count=60, deadline=None)


def pytest_report_header() -> str:
    servers = (PostgresServer, PgBouncer, ValkeyServer, RedisServer)
    missing = [f"{cls.__name__} ({reason})" for cls in servers if (reason := cls.unavailable())]
    return f"django: {django.get_version()}, servers missing: {', '.join(missing) or 'none'}"


#: What starts a server, or is asked for by who starts one.
SERVER_FIXTURES = {
    *("servers", "server_dir", "postgres", "pgbouncer", "pgbouncer_session", "valkey", "redis7", "celery_queue")
}
#: Modules whose tests are runs of other processes, or of many seconds; `--quick` does not even import them.
NOT_QUICK = {
    "test_celery",
    "test_celery_canvas",
    "test_celery_once",
    "test_decorators",
    "test_django_tasks",
    "test_exit",
    "test_fork",
    "test_fork_in_c",
    "test_green_threads",
    "test_isolation",
    "test_list_locks",
    "test_liveness",
    "test_model",
    "test_patches",
    "test_project",
    "test_queues",
    "test_reap_locks",
    "test_run_locked_usage",
    "test_servers",
    "test_strikes",
    "test_table_sqlite_containers",
    "test_table_sqlite_fork",
    "test_table_sqlite_strikes",
    "test_uwsgi",
    "test_waiting_in_loops",
}

#: Modules of few tests that take long. They come first, so that no worker is left with one when the others are done.
LONG_MODULES = (
    "test_run_locked",
    "test_packaging",
    "test_browser",
    "test_test_runs",
    "test_doubles",
    "test_demo",
    "test_advisory_runs",
    "test_tutorial",
    "test_page_servers",
    "test_parameters",
)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: most of a test of locks is waiting, so that three on a core are no load."""
    return min(8, 3 * (os.cpu_count() or 1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the tests that need no server and no long process run")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    long = collection_path.stem in LONG_MODULES or collection_path.stem in NOT_QUICK
    return True if long and config.getoption("quick") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONG_MODULES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    if config.getoption("quick"):
        slow = [item for item in items if takes_long(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


@pytest.fixture(autouse=True, scope="session")
def no_processes_if_quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the contract, `--quick` leaves out what takes another process."""
    if not request.config.getoption("quick"):
        yield
        return
    from angee_jobs.locks.testing import ContractCase

    def skip(case: ContractCase, *args: Any) -> None:
        case.needs("processes")
        case.skipTest("--quick starts no process")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContractCase, "peer", skip)
        patch.setattr(ContractCase, "new_peer", skip)
        yield


def pytest_collection_finish() -> None:
    """Let no test's gc.collect() go through the thousands of tests that were collected: it takes 0.1 s each time."""
    gc.freeze()


def takes_long(item: pytest.Item) -> bool:
    """Whether a test needs a server, or is marked as long."""
    if item.get_closest_marker("alone") or item.get_closest_marker("slow"):
        return True
    callspec = getattr(item, "callspec", None)
    backend = callspec.params.get("alias") if callspec else None
    return bool(LOCK_BACKENDS.get(backend)) or not SERVER_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> None:
    """What starts a server asks for this first."""
    if request.config.getoption("quick"):
        pytest.skip("--quick starts no server")


def migrate(alias: str) -> None:
    call_command("migrate", database=alias, run_syncdb=True, verbosity=0, interactive=False)
    connections[alias].close()


@pytest.fixture(scope="session", autouse=True)
def databases() -> Iterator[None]:
    """Both SQLite files with all tables."""
    setup_test_environment(debug=False)
    migrate("default")
    source, copy = (Path(settings.DATABASES[alias]["NAME"]) for alias in ("default", "other"))
    shutil.copyfile(source, copy)
    yield
    connections.close_all()
    teardown_test_environment()


@pytest.fixture(autouse=True)
def fresh_connections() -> Iterator[None]:
    """No test sees another test's connection, or its open transaction."""
    yield
    connections.close_all()


@pytest.fixture(scope="session")
def postgres_server(databases: None, servers: None) -> Iterator[PostgresServer]:
    require(PostgresServer.unavailable())
    # A disk that stalls for seconds is no test of a lock. What a killed server has written, the system has and keeps.
    with PostgresServer(settings.POSTGRES_DIR, port=settings.POSTGRES_PORT, options={"fsync": "off"}) as server:
        migrate("postgres")
        yield server
        connections.close_all()


@pytest.fixture(scope="session")
def pgbouncer_server(postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    require(PgBouncer.unavailable())
    with PgBouncer(settings.PGBOUNCER_DIR, postgres_server, port=settings.PGBOUNCER_PORT) as server:
        yield server


@pytest.fixture(scope="session")
def pgbouncer_session_server(postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    require(PgBouncer.unavailable())
    directory, port = settings.PGBOUNCER_SESSION_DIR, settings.PGBOUNCER_PORT
    with PgBouncer(directory, postgres_server, port=port, pool_mode="session") as server:
        yield server


@pytest.fixture(scope="session")
def valkey_server(servers: None) -> Iterator[ValkeyServer]:
    require(ValkeyServer.unavailable())
    with ValkeyServer(settings.VALKEY_SOCKET.parent) as server:
        yield server


@pytest.fixture(scope="session")
def redis7_server(servers: None) -> Iterator[RedisServer]:
    require(RedisServer.unavailable())
    with RedisServer(settings.TEST_DIR / "redis") as server:
        yield server


@pytest.fixture
def server_dir() -> Path:
    """A new folder with a short path, for a server of the test's own."""
    directory = Path(tempfile.mkdtemp(prefix="s-", dir=TEST_DIR))
    directory.chmod(0o711)
    return directory


def healed(*servers: Server) -> Iterator[Server]:
    for server in servers:
        server.heal()
        if isinstance(server, RespServer):
            server.terminate_all()  # the idle connections of earlier tests are not this one's
    yield servers[-1]
    connections.close_all()
    for server in servers:
        server.heal()


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[Server]:
    """PostgreSQL behind the database alias "postgres"."""
    yield from healed(postgres_server)


@pytest.fixture
def pgbouncer(postgres_server: PostgresServer, pgbouncer_server: PgBouncer) -> Iterator[Server]:
    """PgBouncer in transaction mode behind the database alias "pgbouncer"."""
    yield from healed(postgres_server, pgbouncer_server)


@pytest.fixture
def pgbouncer_session(postgres_server: PostgresServer, pgbouncer_session_server: PgBouncer) -> Iterator[Server]:
    """PgBouncer in session mode."""
    yield from healed(postgres_server, pgbouncer_session_server)


@pytest.fixture
def valkey(valkey_server: ValkeyServer) -> Iterator[Server]:
    """Valkey behind the cache alias "redis", emptied after the test."""
    yield from healed(valkey_server)
    with valkey_server.connect() as client:
        client.flushall()


@pytest.fixture
def redis7(redis7_server: RedisServer) -> Iterator[Server]:
    """Redis, emptied after the test."""
    yield from healed(redis7_server)
    with redis7_server.connect() as client:
        client.flushall()


#: The lock backends of the settings, and the server that each needs.
LOCK_BACKENDS = {
    "local": None,
    "sqlite": None,
    "postgres_table": "postgres",
    "postgres_advisory": "postgres",
    "redis": "valkey",
}


@pytest.fixture(params=LOCK_BACKENDS)
def alias(request: pytest.FixtureRequest) -> str:
    """Each lock backend in turn, as an alias of ANGEE_JOBS_LOCKS, with its server running."""
    if server := LOCK_BACKENDS[request.param]:
        request.getfixturevalue(server)
    if request.param not in settings.ANGEE_JOBS_LOCKS:
        pytest.skip(f"there is no lock backend {request.param!r}")
    return request.param


@pytest.fixture
def as_in_production(alias: str) -> Iterator[None]:
    """Sessions stay open between requests; a test run closes each at once."""
    if not alias.startswith("postgres"):
        yield
        return
    from tests.support.pg_helpers import sessions_stay

    with sessions_stay(alias):
        yield


@pytest.fixture(scope="session")
def celery_queue(databases: None, servers: None) -> Iterator[Any]:
    """A broker of its own with the app of `tests.support.children.celery_app`, and the workers that a test starts."""
    require(ValkeyServer.unavailable() or missing_packages("celery"))
    from tests.support.celery_workers import CeleryQueue

    with ValkeyServer(settings.TEST_DIR / "broker") as server:
        with CeleryQueue(server) as queue:
            yield queue
