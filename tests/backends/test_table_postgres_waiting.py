"""The lock table on PostgreSQL: waiting for it."""

import threading
import time

import pytest

from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.backends.table import postgres_sql as table_postgres_sql
from angee_jobs.locks.errors import LockBackendError
from angee_jobs.locks.keys import name_digest
from tests.support.pg_helpers import (
    in_production,
    within,
)
from tests.support.pg_table import NAME, _backend, acquire, backend, direct
from tests.support.servers import eventually

__all__ = ["backend", "direct", "in_production"]


def test_a_release_tells_only_those_who_wait(direct, postgres):
    with postgres.connect() as ear:
        ear.execute(f"LISTEN {table_postgres_sql.CHANNEL}")
        for name in (NAME, "angee:name:waited"):
            owner, _ = acquire(direct, name)
            if name != NAME:
                assert 25 < direct.remaining(name, within()) <= 30
            direct.release(name, owner, within())
        # They are heard in the order in which they were sent.
        assert [n.payload for n in ear.notifies(timeout=10, stop_after=1)] == [name_digest("angee:name:waited")]


@pytest.mark.parametrize("end", ["release", "force_release"])
def test_a_waiter_is_woken(backend, end):
    other = TableLockBackend(alias=backend.db_alias)
    try:
        for _ in range(10):
            owner, _ = acquire(other)
            assert backend.remaining(NAME, within())
            backend.wait_for_change(0.01)  # connects
            assert backend.remaining(NAME, within())
            arguments = (NAME, owner, within()) if end == "release" else (NAME, within())
            threading.Timer(0.1, getattr(other, end), arguments).start()
            started = time.monotonic()
            woken = list(backend.wait_for_change(5.0))
            assert woken == [NAME]
            assert time.monotonic() - started < 3
            assert backend.remaining(NAME, within()) is None
    finally:
        other.close()


def test_watching_stops_at_once_and_leaves_no_session(backend, postgres):
    others = len(postgres.sessions())
    for _ in range(5):
        acquire(backend)
        backend.remaining(NAME, within())
        backend.wait_for_change(0.01)
        thread = threading.Thread(target=lambda: backend.wait_for_change(20.0))
        thread.start()
        eventually(lambda: not backend.push or backend._listener._in_use.locked(), 10, "it listens")
        backend.stop_watching()
        thread.join(10)
        assert not thread.is_alive()
    backend.close()
    if backend.push:
        eventually(lambda: len(postgres.sessions()) <= others)


def test_a_lost_listening_session_is_replaced(direct, postgres):
    acquire(direct)
    direct.remaining(NAME, within())
    assert direct.wait_for_change(1) is None
    assert list(direct.wait_for_change(0.05)) == []
    for session in postgres.sessions():
        postgres.terminate(session.pid)
    answers = []
    for _ in range(3):
        try:
            answers.append(direct.wait_for_change(0.05))
        except LockBackendError:
            pass
    assert None in answers  # whatever was sent meanwhile was missed


def test_through_a_pooler_nothing_listens(postgres, pgbouncer, in_production):
    [backend] = _backend("pgbouncer", postgres)
    acquire(backend)
    assert backend.push is False
    backend.remaining(NAME, within())
    assert list(backend.wait_for_change(0.3)) == []
    assert postgres.query("SELECT waited_until FROM angee_jobs_tasklock WHERE owner <> ''") == [(None,)]
    backend.force_release(NAME, within())
    backend.close()
