"""Lists of very many holds: the scan that a page makes, and that it shows what reading every record would show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from django.test import override_settings

from angee_jobs.admin import listing as heldlocks
from angee_jobs.admin.listing import _Best, listing
from angee_jobs.admin.query import ORDERS, Query
from angee_jobs.locks import lock_backends
from angee_jobs.locks.backends.base import BaseLockBackend, Extension
from angee_jobs.locks.backends.redis import backend as redis
from angee_jobs.locks.backends.table import sqlite as table_sqlite
from angee_jobs.locks.clock import now
from tests.support.servers import PostgresServer, ValkeyServer, eventually

LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "other"}},
    "table": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "postgres"}},
    "redis": {"BACKEND": "angee_jobs.locks.RedisLockBackend", "OPTIONS": {"cache": "redis"}},
}
HOLDERS = [
    {"host": "worker-1", "pid": 812, "thread": "MainThread", "ttl": 30, "task": "shop.sync", "note": ""},
    {"host": "worker-10", "pid": 30, "thread": "MainThread", "ttl": 812, "task": "", "note": "Zürich [east]"},
    {"host": "notes", "pid": 1, "thread": "pid", "task": "", "note": "a\\b\n"},
]


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS):
        yield


def soon() -> float:
    return now() + 5


def fill(backend: BaseLockBackend, count: int = 11) -> list[str]:
    """Names of live holds, among others that have expired or are free again."""
    for record in list(backend.list_held(soon())):
        backend.force_release(record.name, soon())
    live = []
    for number in range(count):
        text = json.dumps(HOLDERS[number % 3]) if number % 4 else "not JSON: worker-1"
        name = f"angee:record:shop.Order:{number:02}:in%3Avoice" if number % 2 else f"angee:name:Wörk-{number:02}"
        assert backend.acquire(name, f"owner-{number}", 60 + number % 5, text, soon())
        assert backend.acquire(f"{name}-over", f"owner-{number}", 0.001, text, soon())
        assert backend.acquire(f"{name}-free", f"owner-{number}", 60, text, soon())
        assert backend.release(f"{name}-free", f"owner-{number}", soon())
        live.append(name)
    eventually(lambda: not any(record.name.endswith("-over") for record in backend.list_held(soon())))
    return live


def scanned(backend: BaseLockBackend, *fields: str) -> list[Any]:
    found = backend.scan_held(fields, soon())
    assert found is not None
    return [row for rows in found for row in rows]


def test_a_scan_of_the_lock_file_goes_stretch_by_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = lock_backends.operations("default")
    live = fill(backend)
    for rows in (1, 2, 3, 1000):
        monkeypatch.setattr(table_sqlite, "SCAN_ROWS", rows)
        assert sorted(row[0] for row in scanned(backend)) == sorted(live)


def test_a_scan_of_redis_passes_holds_that_end_together(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = lock_backends.operations("redis")
    live = fill(backend)
    batch = [Extension(name, f"owner-{number}", 300.0) for number, name in enumerate(live)]
    assert len(backend.extend(batch[2:], soon())) == len(live) - 2
    with valkey.connect() as client:
        client.zadd(f"{backend.prefix}index", {"angee:name:of-no-hold": 9e15})
    try:
        for parts in (1, 2, 3, 1000):
            monkeypatch.setattr(redis, "SCAN", parts)
            assert sorted(row[0] for row in scanned(backend, "holder")) == sorted(live), "each of them once"
    finally:
        with valkey.connect() as client:
            client.zrem(f"{backend.prefix}index", "angee:name:of-no-hold")


QUERIES = [
    *({"o": way + order, "backend": alias} for order in ORDERS for way in ("", "-") for alias in LOCKS),
    *({"o": "key", "q": text} for text in (
        "worker-1", "WORKER-10", "812", "30", "pid", "host", "ttl", "note", "[east]", "[ea", "zürich", "u00fc", "wörk",
        "in:voice", "order voice", "3avoice", "mainthread", "shop.sync wörk", "not", "a\\b", "e-1 in:voice", "e+1",
    )),
    {"kind": "record"},
    {"kind": "name", "q": "mainthread", "o": "holder"},
    {"p": "2"},
    {"p": "3", "o": "-since"},
]  # fmt: skip


@pytest.mark.parametrize("alias", ["default", "redis"])
def test_several_holders_of_a_key_over_two_pages(
    alias: str, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldlocks, "PAGE_ROWS", 3)
    backend = lock_backends.operations(alias)
    for record in list(backend.list_held(soon())):
        backend.force_release(record.name, soon())
    for number in range(5):
        assert backend.acquire("angee:name:many", f"{number:032}~5", 60, "{}", soon())
    pages = [listing(Query(backend=alias, order="since", page=page)) for page in (1, 2)]
    assert [[row.place for row in found.rows] for found in pages] == [[0, 1, 2], [3, 4]]
    assert len({row.target for found in pages for row in found.rows}) == 5
    assert backend.force_release("angee:name:many", soon())


def test_a_page_shows_what_it_would_with_all_records(
    postgres: PostgresServer, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldlocks, "PAGE_ROWS", 12)
    operations = [lock_backends.operations(alias) for alias in LOCKS]
    for backend in operations:
        fill(backend)

    def shown(query: dict[str, str]) -> Any:
        found = listing(Query.of(query))
        assert not found.errors
        rows = [(row.backend, row.name, row.holder, row.fencing_token, row.acquired_at) for row in found.rows]
        return rows, found.matching, found.read, found.backends, found.kinds, found.pages

    for query in QUERIES:
        quick = shown(query)
        with monkeypatch.context() as patched:
            for backend in operations:
                patched.setattr(backend, "scan_held", lambda fields, deadline: None)
            whole = shown(query)
        if query.get("o", "").endswith("expires"):  # by what is left, which an answer later is less
            quick[0].sort(), whole[0].sort()
        assert quick == whole, query
    assert shown({"q": "zürich"})[1] and not shown({"q": "host"})[1]
    for backend in operations:
        for record in list(backend.list_held(soon())):
            backend.force_release(record.name, soon())


def test_a_hold_that_ends_while_the_page_is_made_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = lock_backends.operations("default")
    live = fill(backend)
    inspect_many = backend.inspect_many

    def late(names: Any, deadline: float) -> Any:
        backend.force_release(live[3], deadline)
        return inspect_many(names, deadline)

    monkeypatch.setattr(backend, "inspect_many", late)
    found = listing(Query.of({"backend": "default"}))
    assert {row.name for row in found.rows} == {*live} - {live[3]} and not found.errors


def test_a_backend_that_fails_after_the_scan_shows_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = lock_backends.operations("default")
    fill(backend)
    monkeypatch.setattr(backend, "inspect_many", lambda names, deadline: 1 / 0)
    found = listing(Query.of({"backend": "default"}))
    assert found.rows == [] and "ZeroDivisionError" in found.errors["default"]


@pytest.mark.parametrize("order", ["since", "-since"])
def test_the_best_of_many_are_those_of_a_sort_of_all(order: str) -> None:
    """Also among equals, where the first of many come last, and when more are added after the first cut."""
    random = Random(7)
    rows = [(f"{number:05}", random.choice([1.0, 2.0, None]), None, None) for number in range(6000)]
    random.shuffle(rows)
    best = _Best(order, 500)
    for at in range(0, len(rows), 500):
        best.add(rows[at : at + 500], "default")
    known = sorted(((value, name) for name, value, _, _ in rows if value is not None), reverse=order.startswith("-"))
    assert [name for name, _, _ in best.in_order()] == [name for _, name in known[:500]]
