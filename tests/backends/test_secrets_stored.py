"""What the storages keep of an owner id, and are told of it, is a hash, which is of no use to who reads it."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path

import pytest

from angee_jobs.locks import (
    LockLostError,
    attach_lock,
    clock,
    lock,
    lock_backends,
    task_lock_is_held,
)
from angee_jobs.locks.backends.base import Extension
from tests.support.secret_ids import KEY, Secrets, cycle, made_ids  # noqa: F401  (fixture)
from tests.support.servers import PostgresServer, RespServer, eventually


def detached(at: str) -> str:
    first = lock(KEY, backend=at)
    assert first.acquire()
    return str(first.detach(60))


def is_of_no_use(stolen: str, at: str) -> None:
    """What a reader of the storage has found: nothing can be done with it here."""
    backend, name = lock_backends.operations(at), f"angee:name:{KEY}"
    deadline = clock.now() + 5
    with pytest.raises(LockLostError):
        attach_lock(KEY, stolen, backend=at)
    assert backend.adopt(name, stolen, "heir", 60, "", deadline) is None
    assert not list(backend.extend([Extension(name, stolen, 60)], deadline))
    assert backend.release(name, stolen, deadline) is False
    assert task_lock_is_held(KEY, backend=at)


def test_the_lock_file_has_only_hashes(secrets: Secrets) -> None:
    owner_id = detached("sqlite")
    path = lock_backends["sqlite"].path()  # type: ignore[attr-defined]
    stored = b"".join(Path(path + suffix).read_bytes() for suffix in ("", "-wal") if Path(path + suffix).exists())
    assert f"angee:name:{KEY}".encode() in stored
    assert not [each for each in secrets.ids if each.encode() in stored]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        [(owner,)] = connection.execute("SELECT owner FROM lock WHERE name = ?", [f"angee:name:{KEY}"])
    is_of_no_use(owner, "sqlite")
    assert attach_lock(KEY, owner_id, backend="sqlite").release()


@pytest.mark.parametrize("at", ["postgres_table", "postgres_advisory"])
def test_postgresql_is_told_only_hashes(at: str, postgres: PostgresServer, secrets: Secrets) -> None:
    """Neither its tables, nor its activity, nor a log of every statement with its parameters."""
    for setting in ("log_statement = 'all'", "log_parameter_max_length = -1"):
        postgres.query(f"ALTER SYSTEM SET {setting}")
    postgres.query("SELECT pg_reload_conf()")
    start = len(postgres.log())
    try:
        eventually(lambda: postgres.query("SHOW log_statement") == [("all",)])
        activity: list[str] = []
        cycle(at, lambda value: activity.append(str(postgres.query("SELECT * FROM pg_stat_activity"))))
        owner_id = detached(at) if lock_backends.operations(at).leases else ""
        tables = [str(postgres.query(f"SELECT * FROM {t}")) for t in ("angee_jobs_tasklock", "angee_jobs_sessionhold")]
        log = postgres.log()[start:]
    finally:
        postgres.query("ALTER SYSTEM RESET ALL")
        postgres.query("SELECT pg_reload_conf()")
    assert "angee_jobs" in log
    for text in [log, *activity, *tables]:
        assert not secrets.in_text(text)
    if owner_id:
        [(owner,)] = postgres.query("SELECT owner FROM angee_jobs_tasklock WHERE name = %s", [f"angee:name:{KEY}"])
        is_of_no_use(owner, at)
        assert attach_lock(KEY, owner_id, backend=at).release()


def test_redis_is_told_only_hashes(valkey: RespServer, secrets: Secrets) -> None:
    """Neither its keys, nor MONITOR, nor its slow log."""
    heard: list[str] = []
    with valkey.connect() as client, valkey.connect() as watcher:
        client.config_set("slowlog-log-slower-than", 0)
        try:
            with watcher.monitor() as monitor:

                def listen() -> None:
                    while not heard or "that is all" not in heard[-1]:
                        heard.append(str(monitor.next_command()))

                thread = threading.Thread(target=listen, daemon=True)
                thread.start()
                cycle("redis", lambda value: None)
                owner_id = detached("redis")
                client.echo("that is all")
                thread.join(10)
                assert not thread.is_alive()
            slow = str(client.slowlog_get(1000))
        finally:
            client.config_set("slowlog-log-slower-than", 10000)
        prefix = lock_backends["redis"].prefix  # type: ignore[attr-defined]
        stored = {key: client.get(key) for key in client.keys("*") if client.type(key) == b"string"}
        hold = stored[f"{prefix}hold:angee:name:{KEY}".encode()]
        index = str(client.zrange(f"{prefix}index", 0, -1, withscores=True))
    assert "EVALSHA" in str(heard).upper()
    for text in [*heard, slow, str(stored), index]:
        assert not secrets.in_text(text)
    for stolen in (hold[48:112].decode(), hold.decode(), hold[:48].decode()):
        is_of_no_use(stolen, "redis")
    assert attach_lock(KEY, owner_id, backend="redis").release()
