"""Session locks that are released by force.

The last three tests come from the torture run (`python -m tests.torture`).
"""

import threading

import pytest

from angee_jobs.locks import clock
from angee_jobs.locks.backends.advisory import backend as advisory
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.advisory.sql import advisory_key, ask_channel, halves
from angee_jobs.locks.backends.postgres.sockets import wait_for
from angee_jobs.locks.errors import LockBackendError
from tests.support.advisory import (
    NAME,
    _nothing_left,
    acquire,
    alias,
    backend,
    believed,
    in_background,
    locks,
    other,
    watch,
)
from tests.support.pg_helpers import (
    in_production,
    within,
)
from tests.support.servers import eventually

__all__ = ["_nothing_left", "alias", "backend", "in_production", "other"]


def test_force_asks_the_holder(backend, other, postgres):
    owner, grant = acquire(backend)
    kept, _ = acquire(backend, "angee:name:kept")
    stop = threading.Event()
    thread = threading.Thread(target=in_background, args=[backend, stop])
    thread.start()
    try:
        assert other.force_release(NAME, within()).name == NAME
    finally:
        stop.set()
        thread.join()
    assert watch(backend, (NAME, owner), ("angee:name:kept", kept)) == {kept}
    assert backend.release(NAME, owner, within()) is False
    assert acquire(other)[1].fencing_token > grant.fencing_token
    assert other.force_release("angee:name:free", within()) is None
    assert backend.force_release("angee:name:kept", within()).name == "angee:name:kept"
    assert watch(backend, ("angee:name:kept", kept)) == set()


def test_force_frees_no_later_hold_of_the_same_session(backend, postgres):
    """The hold that is to go is released, and taken again, between the look at it and the request."""
    owner, _ = acquire(backend)
    run, later = backend._session.run, []

    def interfere(*args, **kwargs):
        backend._session.run = run
        assert backend.release(NAME, owner, within())
        later.append(acquire(backend))
        return run(*args, **kwargs)

    backend._session.run = interfere
    assert backend.force_release(NAME, within()) is None
    [(owner, grant)] = later
    assert grant
    assert locks(postgres) == believed(backend) == [halves(advisory_key(NAME))]
    assert backend.release(NAME, owner, within())


def test_force_with_a_token_asks_only_for_that_hold(backend, other, postgres):
    owner, grant = acquire(other)
    stop = threading.Event()
    watcher = threading.Thread(target=in_background, args=[other, stop])
    watcher.start()
    try:
        assert backend.force_release(NAME, within(), grant.fencing_token - 1) is None
        assert locks(postgres) == [halves(advisory_key(NAME))]
        eventually(lambda: backend.inspect(NAME, within()).fencing_token == grant.fencing_token)
        assert backend.force_release(NAME, within(), grant.fencing_token - 1) is None
        assert backend.force_release(NAME, within(), grant.fencing_token).fencing_token == grant.fencing_token
        assert locks(postgres) == []
        assert not other.release(NAME, owner, within())
    finally:
        stop.set()
        watcher.join()


def test_a_holder_that_does_not_answer_loses_its_session(backend, other, monkeypatch):
    monkeypatch.setattr(advisory, "ASKED_SECONDS", 0.8)  # so that there is time for the last look
    names = [NAME, "angee:name:a", "angee:name:b"]
    holds = [(name, acquire(backend, name)[0]) for name in names]
    assert other.inspect(NAME, within())  # connects
    started = clock.now()
    with pytest.raises(LockBackendError, match="end_session"):
        other.force_release(NAME, within(2.3))
    assert clock.now() - started < 4.5
    pid, records = other.holds_beside(NAME, within())
    assert len(records) == 3
    assert other.end_session(NAME, pid + 1, within()) is False
    assert other.end_session(NAME, pid, within()) is True
    eventually(lambda: not watch(backend, *holds), timeout=4)
    eventually(lambda: other.holds_beside(NAME, within()) is None)


def ask(postgres, session, token=""):
    """What a process says that wants the lock by force."""
    sql = "SELECT pg_notify(%s, %s || extract(epoch FROM clock_timestamp()))"
    postgres.query(sql, [ask_channel(session.server_pid), f"{advisory_key(NAME)}:{token}:"])
    eventually(lambda: wait_for(session._pgconn.socket, 0))


@pytest.fixture
def sessions(postgres, in_production):
    """Two backends, each as a process of its own would have it."""
    backends = [PostgresAdvisoryLockBackend(alias="postgres") for _ in range(2)]
    yield backends
    for each in backends:
        each._session.pool.slots[0].drop()


@pytest.mark.once
def test_a_hold_that_was_given_up_by_force_is_lost_though_the_server_hung_meanwhile(postgres, sessions):
    """What the server had done to free it was taken for the holder's own release, which so learned nothing."""
    backend, other = sessions
    grant = backend.acquire(NAME, "owner", 5.0, "{}", within())
    ask(postgres, backend._session.pool.slots[0].session)
    with postgres.hanging():
        backend.extend([], within(0.3))  # hears of it, and gets no answer
    eventually(lambda: other.acquire(NAME, "next", 5.0, "{}", within()))
    assert backend.release(NAME, "owner", within()) is False
    assert other.release(NAME, "next", within()) is True
    again = backend.acquire(NAME, "again", 5.0, "{}", within())
    assert again.fencing_token > grant.fencing_token
    assert backend.release(NAME, "again", within()) is True
    assert postgres.advisory_locks() == 0


@pytest.mark.once
def test_a_request_by_force_that_is_heard_late_does_not_end_the_next_hold(postgres, sessions):
    """Who asks does not know the token of a hold that is younger than a second."""
    backend, other = sessions
    assert backend.acquire(NAME, "first", 5.0, "{}", within())
    session = backend._session.pool.slots[0].session
    ask(postgres, session)
    assert backend.release(NAME, "first", within()) is True
    assert backend.acquire(NAME, "second", 5.0, "{}", within())
    backend.extend([], within(0.3))  # hears of it
    assert other.acquire(NAME, "third", 5.0, "{}", within()) is None
    assert backend.release(NAME, "second", within()) is True


@pytest.mark.once
@pytest.mark.parametrize(
    "payload", ["", "x", "1", "1:2", ":::", "1:x:3", "1::x", "1::nan", "1::1e9", "9" * 7000, "1:2:3:4"]
)
def test_anybody_may_say_anything_where_holds_are_asked_for(postgres, sessions, payload):
    backend, _ = sessions
    assert backend.acquire(NAME, "owner", 5.0, "{}", within())
    session = backend._session.pool.slots[0].session
    postgres.query("SELECT pg_notify(%s, %s)", [ask_channel(session.server_pid), payload])
    eventually(lambda: wait_for(session._pgconn.socket, 0))
    backend.extend([], within(0.3))
    assert backend.release(NAME, "owner", within()) is True
