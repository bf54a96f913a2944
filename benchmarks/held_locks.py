"""The held-locks page, list_locks and reap_locks with many leases.

    python -m benchmarks.held_locks sqlite|postgres|redis

Live leases and expired ones are written straight into the storage, in the form in which the backend keeps them, since
taking a million locks would take longer than all that is measured. Prints seconds, how many of them were this process's
and the server's CPU, and the peak of this process's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import resource
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIVE, EXPIRED = 100_000, 1_000_000


def names(count: int, what: str) -> Iterator[tuple[int, str]]:
    for number in range(count):
        if number % 3:
            yield number, f"angee:record:messaging.Channel:{number}:{what}"
        else:
            yield number, f"angee:name:{what}-{number}"


def holder(number: int) -> str:
    return json.dumps({"host": f"worker-{number % 40}", "pid": 1000 + number % 97, "thread": "MainThread",
                       "task": f"messaging.sync_channel {secrets.token_hex(8)}", "note": ""})  # fmt: skip


def fill_sqlite(live: int, expired: int) -> None:
    from angee_jobs.locks import held_locks, lock_backends
    from angee_jobs.locks.backends.table import sqlite_sql as sql

    assert not list(held_locks())  # makes the file
    connection = lock_backends.operations("default").file.connection()  # type: ignore[attr-defined]
    now = sql.now()

    def rows() -> Iterator[tuple[Any, ...]]:
        for count, what, expires in ((live, "live", now + 3600), (expired, "over", now - 3600)):
            for number, name in names(count, what):
                yield name, secrets.token_hex(32), holder(number), time.time() - number / 10, now, expires, number + 1

    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO lock VALUES (?, ?, ?, ?, ?, ?, ?)", rows())
    connection.execute("COMMIT")


def fill_postgres(live: int, expired: int) -> None:
    from django.db import connection

    from angee_jobs.locks.keys import name_digest

    with connection.cursor() as cursor:
        columns = "digest, name, owner, holder, acquired_at, expires_at, fencing_token"
        with cursor.copy(f"COPY angee_jobs_tasklock ({columns}) FROM STDIN") as copy:
            for count, what, seconds in ((live, "live", 3600), (expired, "over", -3600)):
                end = time.strftime("%Y-%m-%d %H:%M:%S+00", time.gmtime(time.time() + seconds))
                for number, name in names(count, what):
                    since = time.strftime("%Y-%m-%d %H:%M:%S+00", time.gmtime(time.time() - number / 10))
                    copy.write_row((name_digest(name), name, secrets.token_hex(32), holder(number), since, end, number))
        cursor.execute("VACUUM ANALYZE angee_jobs_tasklock")


def fill_redis(live: int, expired: int) -> None:
    from django.core.cache import caches

    from angee_jobs.locks import lock_backends

    prefix = lock_backends.operations("default").prefix  # type: ignore[attr-defined]
    client = caches["redis"]._cache.get_client()  # type: ignore[attr-defined]
    for count, what, seconds in ((live, "live", 3600), (expired, "over", -3600)):
        ends = time.time() + seconds
        rows = names(count, what)
        while batch := list(itertools.islice(rows, 5000)):
            holds, index = {}, {}
            for number, name in batch:
                end, since = int(ends * 1e6) + number, int((time.time() - number / 10) * 1e6)
                head = f"{end:016}{number + 1:016}{since:016}"
                holds[f"{prefix}hold:{name}"] = f"{head}{secrets.token_hex(32)}{holder(number)}"
                index[name] = end
            client.mset(holds)
            client.zadd(f"{prefix}index", index)


#: The server that is measured; None: there is none.
server: Any = None


def server_seconds() -> float:
    """The CPU that the server has used, of all its processes."""
    import psutil

    if server is None:
        return 0.0
    parent = psutil.Process(server.process.pid)
    times = parent.cpu_times()
    seconds: float = times.user + times.system + times.children_user + times.children_system
    for child in parent.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += child.cpu_times().user + child.cpu_times().system
    return seconds


def longest_request() -> float:
    """Of a Redis server since the last question, in milliseconds."""
    from django.core.cache import caches

    client = caches["redis"]._cache.get_client()  # type: ignore[attr-defined]
    longest = max((entry["duration"] for entry in client.slowlog_get(1000)), default=0) / 1000
    client.config_set("slowlog-log-slower-than", 1000)
    client.config_set("slowlog-max-len", 1000)
    client.slowlog_reset()
    return longest


def timed(what: str, work: Callable[[], Any]) -> Any:
    start, busy, served = time.perf_counter(), time.process_time(), server_seconds()
    result = work()
    seconds, busy, served = time.perf_counter() - start, time.process_time() - busy, server_seconds() - served
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = f"CPU own {busy:7.3f} s" + (f", server's {served:6.2f} s" if server is not None else "")
    print(f"{what:<40} {seconds:7.3f} s   {cpu}   peak {peak:4.0f} MB", flush=True)
    return result


class Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def measure(only_pages: bool) -> None:
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connection
    from django.test import Client

    User.objects.create_superuser("root")
    client = Client()
    client.force_login(User.objects.get())
    url = "/admin/angee_jobs/tasklock/"

    def page(query: str = "") -> None:
        response = client.get(url + query)
        assert response.status_code == 200
        if b"cannot be asked" in response.content:
            print("(the backend did not answer in time)", end=" ")
        if b"could be read in time" in response.content:
            print("(cut short: not all was read in time)", end=" ")

    page("?backend=nobody")
    pages = {f"by {order}": f"?o={order}" for order in ("since", "key", "holder", "expires", "token", "backend")}
    for what, query in {
        **pages,
        "by -since": "?o=-since",
        "page 500": "?p=500",
        "page 1000": "?p=1000",
        "kind of key: record": "?kind=record",
        "search for one key": "?q=live-99",
        "search for a host": "?q=worker-7",
        "search for what is in all": "?q=mainthread",
        "search for a word with an accent": "?q=z%C3%BCrich",
        "search by holder": "?o=holder&q=worker-7",
    }.items():
        timed(f"page: {what}", lambda query=query: page(query))
    if only_pages:
        return
    timed("list_locks", lambda: call_command("list_locks", stdout=Nowhere()))
    timed("list_locks --format json", lambda: call_command("list_locks", format="json", stdout=Nowhere()))
    timed("list_locks --stale", lambda: call_command("list_locks", stale=True, stdout=Nowhere()))
    timed("reap_locks --dry-run", lambda: call_command("reap_locks", dry_run=True, stdout=Nowhere()))
    out = io.StringIO()
    timed("reap_locks", lambda: call_command("reap_locks", stdout=out))
    print(out.getvalue().strip())
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["sqlite", "postgres", "redis"], nargs="?", default="sqlite")
    parser.add_argument("--live", type=int, default=LIVE)
    parser.add_argument("--expired", type=int, default=EXPIRED)
    parser.add_argument("--pages", action="store_true", help="Only the page, not the commands.")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="angee-bench-", dir="/tmp"))
    directory.chmod(0o711)
    os.environ |= {"ANGEE_JOBS_TEST_DIR": str(directory), "DJANGO_SETTINGS_MODULE": "tests.settings"}
    try:
        run(options.kind, options.live, options.expired, options.pages)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(kind: str, live: int, expired: int, only_pages: bool) -> None:
    import django
    from django.conf import settings

    with contextlib.ExitStack() as stack:
        backend: dict[str, Any] = {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"ttl": 3600}}
        if kind == "postgres":
            settings.DATABASES["default"] = settings.DATABASES["postgres"]
        elif kind == "redis":
            backend = {"BACKEND": "angee_jobs.locks.RedisLockBackend", "OPTIONS": {"cache": "redis", "ttl": 3600}}
        settings.ANGEE_JOBS_LOCKS = {"default": backend}
        settings.ALLOWED_HOSTS = ["testserver"]
        settings.DEBUG = False
        django.setup()
        from django.core.management import call_command

        from tests.support.servers import PostgresServer, ValkeyServer

        global server
        if kind == "postgres":
            server = stack.enter_context(PostgresServer(settings.POSTGRES_DIR, port=settings.POSTGRES_PORT))
        elif kind == "redis":
            server = stack.enter_context(ValkeyServer(settings.VALKEY_SOCKET.parent))
        call_command("migrate", verbosity=0, interactive=False)
        fill = {"sqlite": fill_sqlite, "postgres": fill_postgres, "redis": fill_redis}[kind]
        print(f"{kind}: {live:,} live leases, {expired:,} expired")
        timed("(filling)", lambda: fill(live, expired))
        if kind == "redis":
            longest_request()  # without those of the filling
        measure(only_pages)
        if server is not None and kind == "redis":
            print(f"the longest of all requests took the server {longest_request():.1f} ms")


if __name__ == "__main__":
    main()
