"""The ground of a run: a directory, Django set up in it, and the servers of the backends, with empty tables."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.servers import PostgresServer, ValkeyServer

#: The backends, and the server of each.
BACKENDS = {"sqlite": None, "postgres_table": "postgres", "postgres_advisory": "postgres", "redis": "valkey"}
#: The backends with planted bugs.
PLANTED = {
    "no_owner_check": None,
    "renewal_by_upsert": None,
    "zero_rows_ignored": None,
    "clients_clock": None,
    "refused_frees_anothers": None,
    "unlock_false_ignored": "postgres",
}
#: Of these a hold hangs on a connection; all others are leases.
SESSION_BACKENDS = {"postgres_advisory", "unlock_false_ignored"}
#: The file system that is filled up has this size.
SMALL_DISK = "3m"

REGISTER = [
    "CREATE TABLE torture_register (name varchar(200) PRIMARY KEY, token bigint NOT NULL)",
    "CREATE TABLE torture_history (id {serial}, name varchar(200) NOT NULL, token bigint NOT NULL)",
]


def missing(backends: Sequence[str]) -> dict[str, str]:
    """The backends whose server cannot run here, and why."""
    servers = {"postgres": PostgresServer, "valkey": ValkeyServer}
    found = {}
    for backend in backends:
        server = (BACKENDS | PLANTED).get(backend)
        if server and (reason := servers[server].unavailable()):
            found[backend] = reason
    return found


class Ground(contextlib.ExitStack):
    """Made once in a process, before Django is used: it sets Django up."""

    def __init__(self, backends: Sequence[str], *, ttl: float, small_disk: bool = False) -> None:
        super().__init__()
        self.backends = list(backends)
        self.servers: dict[str, Any] = {}
        self.small_disk = ""
        """"mounted" if there is one that can be filled up, else why not; empty if none was asked for."""
        # In /tmp, because the path of a Unix socket may have only about 100 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="angee-t-", dir="/tmp" if os.path.isdir("/tmp") else None))
        self.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.directory.chmod(0o711)
        self.logs = self.directory / "logs"
        for folder in (self.logs, self.directory / "sqlite"):
            folder.mkdir()
        os.environ["ANGEE_JOBS_TEST_DIR"] = str(self.directory)
        os.environ["ANGEE_JOBS_TORTURE_TTL"] = str(ttl)
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.torture.settings"
        try:
            if small_disk:
                self._mount()
            self._start()
        except BaseException:
            self.close()
            raise

    def _mount(self) -> None:
        folder = self.directory / "sqlite"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            self.small_disk = f"no small file system can be mounted: {done.stderr.strip()}"
        else:
            self.small_disk = "mounted"
            self.callback(subprocess.run, ["umount", "-l", folder], check=False)

    def _start(self) -> None:
        import django

        django.setup()
        from django.conf import settings
        from django.db import connections

        self.callback(connections.close_all)
        wanted = {server for each in self.backends if (server := (BACKENDS | PLANTED).get(each))}
        if "redis" in self.backends and not PostgresServer.unavailable():
            wanted.add("postgres")  # what is locked with Redis is written there
        if "postgres" in wanted:
            # A crash of the server is not one of the machine: what it has written is there, synced or not.
            options = {"fsync": "off", "max_connections": 200}
            server = PostgresServer(settings.POSTGRES_DIR, port=settings.POSTGRES_PORT, options=options)
            self.servers["postgres"] = self.enter_context(server)
            self._migrate("postgres", "bigserial PRIMARY KEY")
        if "valkey" in wanted:
            # A lock is kept over a restart only if each write is: here before each answer, but never synced. (With
            # "everysec", a write may be put off, and with "always" a busy disk is what is tested.)
            options = {"appendonly": "yes", "appendfsync": "no", "maxmemory-policy": "noeviction"}
            self.servers["valkey"] = self.enter_context(ValkeyServer(settings.VALKEY_SOCKET.parent, options=options))
        self._migrate("sqlite", "integer PRIMARY KEY AUTOINCREMENT")

    def _migrate(self, alias: str, serial: str) -> None:
        from django.core.management import call_command
        from django.db import connections

        call_command("migrate", database=alias, run_syncdb=True, verbosity=0, interactive=False)
        with connections[alias].cursor() as cursor:
            for statement in REGISTER:
                cursor.execute(statement.format(serial=serial))
        connections[alias].close()

    def register_of(self, backend: str) -> str:
        """The database that what is locked with ``backend`` is written to."""
        if backend == "redis" and "postgres" in self.servers:
            return "postgres"
        return "postgres" if (BACKENDS | PLANTED).get(backend) == "postgres" else "sqlite"
