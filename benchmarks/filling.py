"""Many leases at once, in the form in which the backends keep them: taking them one by one would last too long."""

from __future__ import annotations

import secrets
import time
from typing import Any

from benchmarks.contenders import Ours


def fill(contender: Any, first: int, count: int, seconds: float) -> None:
    assert isinstance(contender, Ours)
    from angee_jobs.locks import clock, lock_backends
    from angee_jobs.locks.holder import describe_holder

    backend: Any = lock_backends.operations(contender.alias)
    holder = describe_holder("")
    names = [f"angee:name:others-{number}" for number in range(first, first + count)]
    if contender.alias == "sqlite":
        _fill_sqlite(backend, names, holder, seconds)
    elif contender.alias == "postgres":
        _fill_postgres(names, holder, seconds)
    else:
        for name in names:
            backend.acquire(name, secrets.token_hex(16), seconds, holder, clock.now() + 5)


def _fill_sqlite(backend: Any, names: list[str], holder: str, seconds: float) -> None:
    from angee_jobs.locks.backends.table import sqlite_sql as sql

    backend.inspect("angee:name:others", time.monotonic() + 10**9)  # makes the file
    now = sql.now()
    rows = [(name, secrets.token_hex(32), holder, time.time(), now, now + seconds, 1) for name in names]
    connection = backend.file.connection()
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO lock VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    connection.execute("COMMIT")


def _fill_postgres(names: list[str], holder: str, seconds: float) -> None:
    from django.db import connections

    from angee_jobs.locks.keys import name_digest

    end = time.strftime("%Y-%m-%d %H:%M:%S+00", time.gmtime(time.time() + (seconds if seconds > 1 else -100)))
    now = time.strftime("%Y-%m-%d %H:%M:%S+00", time.gmtime())
    columns = "digest, name, owner, holder, acquired_at, expires_at, fencing_token"
    with connections["postgres"].cursor() as cursor:
        with cursor.copy(f"COPY angee_jobs_tasklock ({columns}) FROM STDIN") as copy:
            for name in names:
                copy.write_row((name_digest(name), name, secrets.token_hex(32), holder, now, end, 1))
        cursor.execute("VACUUM ANALYZE angee_jobs_tasklock")
