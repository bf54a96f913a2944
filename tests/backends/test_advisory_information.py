"""What is known of session locks of other processes."""

import pytest

from angee_jobs.locks import clock
from angee_jobs.locks.backends.advisory import sql as pg_advisory
from angee_jobs.locks.backends.advisory.sql import advisory_key
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
    within,
)

__all__ = ["_nothing_left", "alias", "backend", "direct", "in_production", "other"]


def test_holders_are_published_after_a_second(backend, other, postgres):
    owner, grant = acquire(backend)
    entry = backend._session.entries[advisory_key(NAME)]
    entry.granted = clock.now() + 10  # however long the next lines take, it is young
    watch(backend, (NAME, owner))
    assert postgres.query("SELECT count(*) FROM angee_jobs_sessionhold") == [(0,)]
    young = other.inspect(NAME, within())
    assert (young.name, young.holder, young.expires_at) == (NAME, None, None)
    assert [record.name for record in other.list_held(within())] != [NAME]
    entry.granted = clock.now() - 1
    watch(backend, (NAME, owner))
    for record in (other.inspect(NAME, within()), *other.list_held(within()), backend.inspect(NAME, within())):
        assert record.name == NAME
        assert record.fencing_token == grant.fencing_token
        assert '"host"' in record.holder
        assert record.acquired_at == pytest.approx(grant.acquired_at, abs=0.001)
    assert backend.release(NAME, owner, within())
    assert postgres.query("SELECT count(*) FROM angee_jobs_sessionhold") == [(0,)]


def test_what_the_dead_have_published_goes_away(backend, other, postgres, monkeypatch):
    monkeypatch.setattr(pg_advisory, "PUBLISH_SECONDS", 0)
    for number in range(10):
        owner, _ = acquire(backend, f"angee:name:{number}")
    watch(backend, ("angee:name:9", owner))
    assert postgres.query("SELECT count(*) FROM angee_jobs_sessionhold") == [(10,)]
    postgres.terminate_all()
    wait_for_the_end_of_sessions(backend)
    assert list(other.list_held(within())) == []
    assert other.inspect("angee:name:1", within()) is None
    owner, _ = acquire(other)
    watch(other, (NAME, owner))
    assert postgres.query("SELECT name FROM angee_jobs_sessionhold") == [(NAME,)]
    postgres.terminate_all()
    wait_for_the_end_of_sessions(other)
    assert other.reap(0, 100, within()) == 0
    assert postgres.query("SELECT count(*) FROM angee_jobs_sessionhold") == [(0,)]


def test_a_note_that_cannot_be_removed_does_not_keep_the_lock(direct, postgres, monkeypatch):
    monkeypatch.setattr(pg_advisory, "PUBLISH_SECONDS", 0)
    owner, _ = acquire(direct)
    watch(direct, (NAME, owner))
    with postgres.connect() as stranger, stranger.transaction():
        stranger.execute("SELECT * FROM angee_jobs_sessionhold FOR UPDATE")
        assert direct.release(NAME, owner, within(2))
    owner, _ = acquire(direct)
    watch(direct, (NAME, owner))
    postgres.query("ALTER TABLE angee_jobs_sessionhold RENAME TO away")
    try:
        assert direct.release(NAME, owner, within(2))
        assert locks(postgres) == []
        owner, _ = acquire(direct)
        assert watch(direct, (NAME, owner)) == {owner}
        assert direct.release(NAME, owner, within(2))
    finally:
        postgres.query("ALTER TABLE away RENAME TO angee_jobs_sessionhold")
