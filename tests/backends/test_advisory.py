"""Session locks on a real PostgreSQL: keys, holds and processes."""

import os

import pytest

from angee_jobs.locks.backends.advisory import backend as advisory
from angee_jobs.locks.backends.advisory import session as pg_holds
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.advisory.sql import advisory_key, halves, marker_key
from angee_jobs.locks.errors import LockBackendError
from tests.support.advisory import (
    NAME,
    _nothing_left,
    acquire,
    alias,
    backend,
    direct,
    locks,
    other,
    wait_for_the_end_of_sessions,
    watch,
)
from tests.support.pg_helpers import (
    in_production,
    in_threads,
    within,
)
from tests.support.servers import eventually

__all__ = ["_nothing_left", "alias", "backend", "direct", "in_production", "other"]


def test_golden_keys():
    """Another release of this package, in another process, must mean the same lock."""
    assert advisory_key("angee:name:billing-run") == 9212507278987731242
    assert marker_key("angee:name:billing-run") == 7007666591921509187
    assert advisory_key("angee:record:messaging.Channel:42:sync") == 911205940149840930


def test_keys_use_all_64_bits(backend, postgres):
    names = [f"angee:name:{number}" for number in range(200)]
    keys = [advisory_key(name) for name in names]
    assert min(keys) < -(2**62)
    assert max(keys) > 2**62
    for name in names[:40]:
        acquire(backend, name)
    assert locks(postgres) == sorted(halves(key) for key in keys[:40])
    assert all(backend.inspect(name, within()) for name in names[:40])
    assert not any(backend.inspect(name, within()) for name in names[40:50])


def test_names_that_share_half_of_a_key_are_two_locks(backend, monkeypatch):
    keys = {"angee:name:a": 1 << 32 | 7, "angee:name:b": 2 << 32 | 7, "angee:name:c": -1, "angee:name:d": 2**63 - 1}
    monkeypatch.setattr(advisory, "advisory_key", keys.__getitem__)
    for name in keys:
        assert backend.inspect(name, within()) is None
        assert acquire(backend, name)[1]
    assert len(list(backend.list_held(within()))) == 4


def test_one_session_carries_all_holds(backend, other, postgres):
    before = len(postgres.sessions())
    holds = [(f"angee:name:{number}", acquire(backend, f"angee:name:{number}")[0]) for number in range(100)]
    assert len(postgres.sessions()) <= before + 1
    assert watch(backend, *holds) == {owner for _, owner in holds}
    assert all(acquire(other, name)[1] is None for name, _ in holds)
    assert all(backend.release(name, owner, within()) for name, owner in holds)
    assert not any(backend.release(name, owner, within()) for name, owner in holds)


def test_it_is_not_re_entrant(backend):
    owner, grant = acquire(backend)
    assert grant
    assert acquire(backend)[1] is None
    assert acquire(backend, owner=owner)[1] is None
    assert in_threads(5, lambda number: acquire(backend)[1]) == [None] * 5
    assert not backend.release(NAME, "somebody else", within())
    assert backend.release(NAME, owner, within())
    assert acquire(backend)[1]


def test_fencing_tokens_go_up_whatever_happens(backend, other, postgres):
    last = 0
    for round_ in range(4):
        for each in (backend, other):
            owner, grant = acquire(each)
            assert grant.fencing_token > last
            last = grant.fencing_token
            assert each.release(NAME, owner, within())
        if round_ == 1:
            postgres.query("TRUNCATE angee_jobs_tasklock, angee_jobs_sessionhold RESTART IDENTITY")
        if round_ == 2:
            postgres.kill()
            postgres.start()
            wait_for_the_end_of_sessions(backend, other)


def test_a_process_holds_only_so_many(direct, monkeypatch):
    monkeypatch.setattr(pg_holds, "MAX_HOLDS", 5)
    for number in range(5):
        acquire(direct, f"angee:name:{number}")
    with pytest.raises(LockBackendError, match=r"holds 5 session locks already.*TableLockBackend") as caught:
        acquire(direct)
    assert not caught.value.uncertain
    assert acquire(direct, "angee:name:1")[1] is None


def test_other_peoples_advisory_locks_are_not_shown(direct, postgres):
    with postgres.connect() as stranger, postgres.connect("postgres") as elsewhere:
        for statement in ("SELECT pg_advisory_lock(1)", "SELECT pg_advisory_lock(1, 2)"):
            stranger.execute(statement)
        elsewhere.execute("SELECT pg_advisory_lock(%s)", [advisory_key(NAME)])
        acquire(direct, "angee:name:mine")
        assert [record.name for record in direct.list_held(within())] == ["angee:name:mine"]
        assert direct.inspect(NAME, within()) is None
        stranger.execute("SELECT pg_advisory_lock(%s)", [advisory_key(NAME)])
        assert direct.inspect(NAME, within()) is not None  # as a try would say
        assert acquire(direct)[1] is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_holds_of_its_own(direct, postgres):
    owner, _ = acquire(direct)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            refused = acquire(direct)[1] is None
            granted = acquire(direct, "angee:name:child")[1] is not None
            alive = watch(direct, (NAME, owner)) == set()
            os.write(write, b"%d%d%d" % (refused, granted, alive))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"111"
    os.close(read)
    os.close(write)
    assert watch(direct, (NAME, owner)) == {owner}
    eventually(lambda: acquire(direct, "angee:name:child")[1])  # the child's exit has freed it
    assert direct.release(NAME, owner, within())


def test_in_a_test_run_the_session_closes_with_its_last_hold(postgres):
    backend = PostgresAdvisoryLockBackend(alias="postgres")
    before = {each.pid for each in postgres.sessions()}
    holds = [(name, acquire(backend, name)[0]) for name in ("angee:name:a", "angee:name:b")]
    assert acquire(backend, "angee:name:a")[1] is None
    assert len({each.pid for each in postgres.sessions()} - before) == 1
    for name, owner in holds:
        assert backend.release(name, owner, within())
    eventually(lambda: {each.pid for each in postgres.sessions()} <= before, 10)
    backend.inspect(NAME, within())
    eventually(lambda: {each.pid for each in postgres.sessions()} <= before, 10)
