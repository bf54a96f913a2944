"""Short cuts on the path of every block give what the long way gives."""

import asyncio

from django.db import connections

from angee_jobs.locks.backends.pg_advisory import advisory_key
from angee_jobs.locks.hold import new_owner_id
from angee_jobs.locks.transactions import open_connections


def test_open_connections_of_a_thread() -> None:
    connections.close_all()
    del connections["default"]
    assert open_connections() == connections.all(initialized_only=True) == []
    connections["default"].ensure_connection()
    assert open_connections() == connections.all(initialized_only=True) == [connections["default"]]


def test_open_connections_of_a_coroutine() -> None:
    async def look() -> None:
        assert open_connections() == connections.all(initialized_only=True) == []
        mine = connections["default"]
        assert open_connections() == connections.all(initialized_only=True) == [mine]
        await asyncio.gather(asyncio.create_task(asyncio.to_thread(connections.close_all)))

    connections["default"].ensure_connection()
    asyncio.run(look())
    # What asgiref keeps for the loop's contexts in the same place is no connection.
    assert open_connections() == connections.all(initialized_only=True) == [connections["default"]]


def test_open_connections_where_asgiref_keeps_them_elsewhere(monkeypatch) -> None:
    connections["default"].ensure_connection()

    class Elsewhere:
        default = connections["default"]

    monkeypatch.setattr(connections, "_connections", Elsewhere())
    assert open_connections() == [Elsewhere.default]


def test_owner_ids_are_as_long_as_those_of_the_secrets_module() -> None:
    ids = {new_owner_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {32}


def test_advisory_key_of_the_cache_is_that_of_its_space() -> None:
    assert (
        advisory_key("angee:name:a") == advisory_key("angee:name:a", "lock") != advisory_key("angee:name:a", "waiters")
    )
