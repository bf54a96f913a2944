"""The lock table on PostgreSQL: how rows leave it, and how many are listed."""

import time

from tests.support.pg_helpers import (
    in_production,
    in_threads,
    within,
)
from tests.support.pg_table import acquire, backend, direct, rows
from tests.support.servers import eventually

__all__ = ["backend", "direct", "in_production"]


def expired(backend, count):
    for number in range(count):
        acquire(backend, f"angee:name:{number}", ttl=0.01)
    time.sleep(0.05)


def test_two_reapers_count_each_row_once(backend, postgres):
    for _ in range(25):
        expired(backend, 60)
        acquire(backend, "angee:name:live")

        def reap(number):
            counts = iter(lambda: backend.reap(0, 7, within(20)), 0)
            return sum(counts)

        # A reaper may find no row that is not another one's just now, and stop; nobody counts twice.
        assert sum(in_threads(2, reap)) + sum(iter(lambda: backend.reap(0, 100, within()), 0)) == 60
        assert [record.name for record in backend.list_held(within())] == ["angee:name:live"]
        assert list(backend.list_expired(0, within())) == []
        backend.force_release("angee:name:live", within())


def test_reaping_minds_the_grace(backend):
    expired(backend, 3)
    assert backend.reap(60, 100, within()) == 0
    assert len(list(backend.list_expired(0, within()))) == 3
    assert list(backend.list_expired(60, within())) == []
    assert backend.reap(0, 2, within()) == 2
    assert backend.reap(0, 2, within()) == 1


def test_rows_leave_the_table(backend, postgres):
    expired(backend, 3)
    owner, _ = acquire(backend, "angee:name:freed")
    backend.release("angee:name:freed", owner, within())
    postgres.query("UPDATE angee_jobs_tasklock SET expires_at = now() - interval '2 minutes'")
    acquire(backend, "angee:name:kept")
    assert backend.reap(0, 100, within()) == 3  # the freed one was over before, and is not counted
    assert rows(postgres, "name") == [("angee:name:kept",)]


def test_the_backend_tidies_by_itself(backend, postgres):
    for number in range(30):
        owner, _ = acquire(backend, f"angee:name:{number}")
        backend.release(f"angee:name:{number}", owner, within())
    expired(backend, 40)
    postgres.query("UPDATE angee_jobs_tasklock SET expires_at = now() - interval '2 minutes' WHERE owner = ''")
    backend._until_tidy = 1
    owner, _ = acquire(backend, "angee:name:last")
    for _ in range(40):  # each looks at the rows after a random point
        backend._until_tidy = 1
        backend.release("angee:name:last", owner, within())
    assert len(rows(postgres)) < 30 + 40 + 1 - 15
    assert len(list(backend.list_expired(0, within()))) >= 40 - 30  # what a reap has to count stays


def test_100_000_holds_are_listed_without_a_long_transaction(direct, postgres):
    postgres.query(
        "INSERT INTO angee_jobs_tasklock SELECT encode(sha256(i::text::bytea), 'hex'), 'angee:name:' || i, 'x', '{}',"
        " now(), now() + interval '1 hour', i, NULL FROM generate_series(1, 100000) AS i"
    )
    held = direct.list_held(within())
    first = [next(held) for _ in range(1500)]
    open_transactions = (
        "SELECT count(*) FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    )
    eventually(lambda: postgres.query(open_transactions) == [(0,)])  # but for one of somebody else that ends just now
    assert len({record.name for record in first} | {record.name for record in held}) == 100_000
