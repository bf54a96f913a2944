"""Short cuts on the path of every block give what the long way gives."""

import asyncio
import threading

from django.db import connections, transaction

from angee_jobs.locks.backends.advisory.sql import advisory_key
from angee_jobs.locks.hold import new_owner_id
from angee_jobs.locks.transactions import _open_here


def test_owner_ids_are_as_long_as_those_of_the_secrets_module() -> None:
    ids = {new_owner_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {32}


def test_advisory_key_of_the_cache_is_that_of_its_space() -> None:
    assert (
        advisory_key("angee:name:a") == advisory_key("angee:name:a", "lock") != advisory_key("angee:name:a", "waiters")
    )


def test_the_open_connections_are_those_that_django_names():
    def both():
        return {id(each) for each in _open_here()}, {id(each) for each in connections.all(initialized_only=True)}

    async def in_a_task():
        return both()

    with transaction.atomic():
        ours, theirs = both()
    assert ours == theirs
    assert ours
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(both()))
    thread.start()
    thread.join(10)
    assert elsewhere == [(set(), set())]
    assert asyncio.run(in_a_task()) == (set(), set())
    # What asgiref has kept for the loop in the same place is no connection.
    ours, theirs = both()
    assert ours == theirs


def test_an_open_connection_may_be_of_any_class():
    """Somebody may have put a proxy in its place; a lock that overlooks its transaction is freed before the commit."""

    class Proxy:
        pass

    proxy = Proxy()
    connections["proxied"] = proxy
    try:
        assert proxy in _open_here()
    finally:
        del connections["proxied"]


def test_open_connections_where_asgiref_keeps_them_elsewhere(monkeypatch):
    connections["default"].ensure_connection()

    class Elsewhere:
        default = connections["default"]

    monkeypatch.setattr(connections, "_connections", Elsewhere())
    assert _open_here() == [Elsewhere.default]
