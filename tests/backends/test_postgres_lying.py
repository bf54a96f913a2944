"""A PostgreSQL that lies from the first word on: LockBackendError in time, nothing acquired, no connection left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.conf import settings
from django.test import override_settings

from angee_jobs.locks import LockBackendError, clock, lock, lock_backends
from tests.backends.test_redis_lying import LyingServer
from tests.support.pg_helpers import alias_with
from tests.support.servers import PostgresServer, eventually

#: What an operation has here, in seconds, and how much later it may end on a busy machine.
SHORT, LATE = 0.3, 2.0
WELCOME = b"R\0\0\0\x08\0\0\0\0" + b"K\0\0\0\x0c\0\0\0\x01\0\0\0\x02" + b"Z\0\0\0\x05I"
ANSWERS = {
    "nothing": b"",
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "an error": b"E\0\0\0\x21SFATAL\0C53300\0Mtoo many\0\0" + b"\0" * 12,
    "half a message": b"R\0\0\0\x08\0\0",
    "a huge length": b"R\x7f\xff\xff\xff",
    "an unknown kind of password": b"R\0\0\0\x08\0\0\0\x63",
    "a welcome and no more": WELCOME,
    "a welcome and an empty answer": WELCOME + b"I\0\0\0\x04Z\0\0\0\x05I",
    "a welcome and other columns": WELCOME
    + b"T\0\0\0\x06\0\0"
    + b"D\0\0\0\x06\0\0"
    + b"C\0\0\0\rSELECT 1\0"
    + b"Z\0\0\0\x05I",
    "a welcome inside a transaction": WELCOME[:-1] + b"T",
    "a welcome and noise": WELCOME + bytes(range(256)),
}


@pytest.fixture(params=["TableLockBackend", "PostgresAdvisoryLockBackend"])
def liar(request: pytest.FixtureRequest) -> Iterator[LyingServer]:
    pytest.importorskip("psycopg")
    with LyingServer() as server:
        entry = {"HOST": "127.0.0.1", "PORT": str(server.port), "OPTIONS": {"sslmode": "disable"}}
        backend = {"BACKEND": f"angee_jobs.locks.{request.param}", "OPTIONS": {"alias": "liar"}}
        locks = settings.ANGEE_JOBS_LOCKS | {"liar": backend}
        with alias_with("liar", **entry), override_settings(ANGEE_JOBS_LOCKS=locks):
            yield server


@pytest.mark.parametrize("what", ANSWERS)
@pytest.mark.parametrize("close", [False, True])
def test_a_server_that_lies(what: str, close: bool, liar: LyingServer) -> None:
    liar.answer, liar.close_after = ANSWERS[what], close
    made = lock("of a liar", backend="liar")
    started = clock.now()
    with pytest.raises(LockBackendError):
        made.acquire(timeout=SHORT)
    assert clock.now() - started < SHORT + LATE
    assert not made.held and not made.lost
    operations = lock_backends.operations("liar")
    for call in (
        lambda at: operations.inspect("a", at),
        lambda at: list(operations.list_held(at)),
        lambda at: operations.force_release("a", at),
    ):
        started = clock.now()
        with pytest.raises(LockBackendError):
            call(started + SHORT)
        assert clock.now() - started < SHORT + LATE
    operations.close()
    eventually(lambda: liar.open <= 1, what="none but that of a try to release")


def test_afterwards_the_true_server_can_be_used(liar: LyingServer, postgres: PostgresServer) -> None:
    liar.answer = ANSWERS["a welcome and noise"]
    with pytest.raises(LockBackendError):
        lock("of a liar", backend="liar").acquire(timeout=SHORT)
    liar.become(f"{postgres.directory}/.s.PGSQL.{postgres.port}")
    with lock("of a liar", backend="liar") as held:
        assert held.held and held.info() is not None
    assert not lock_backends.operations("liar").is_held("of a liar")
