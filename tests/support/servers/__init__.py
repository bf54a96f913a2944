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

from tests.support.servers.base import (
    ADMIN,
    DATABASE,
    SELF,
    Server,
    ServerError,
    User,
    at_exit,
    eventually,
    find_program,
    free_port,
    missing_packages,
    require,
    unprivileged_user,
)
from tests.support.servers.postgres import PgBouncer, PostgresServer, Session, postgres_programs
from tests.support.servers.resp import RedisServer, RespServer, ValkeyServer

__all__ = [
    "ADMIN",
    "DATABASE",
    "SELF",
    "PgBouncer",
    "PostgresServer",
    "RedisServer",
    "RespServer",
    "Server",
    "ServerError",
    "Session",
    "User",
    "ValkeyServer",
    "at_exit",
    "eventually",
    "find_program",
    "free_port",
    "missing_packages",
    "postgres_programs",
    "require",
    "unprivileged_user",
]
