"""Places and shared holds as session locks: what the server has of them, and what only this process knows."""

import threading
import time

import pytest

from angee_jobs.locks.backends.advisory import sql
from angee_jobs.locks.backends.base import ALONE, SHARED, WANTED_SECONDS
from angee_jobs.locks.backends.postgres.errors import NoAnswer
from angee_jobs.locks.backends.postgres.session import Session
from angee_jobs.locks.errors import LockBackendError
from angee_jobs.locks.hold import new_owner_id
from tests.support.advisory import (
    NAME,
    _nothing_left,
    acquire,
    alias,
    backend,
    believed,
    direct,
    locks,
    other,
    session_of,
    wait_for_the_end_of_sessions,
    watch,
)
from tests.support.pg_helpers import in_production, in_threads, within
from tests.support.servers import eventually

__all__ = ["_nothing_left", "alias", "backend", "direct", "in_production", "other"]

SHARE_MODE = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"


def enter(backend, places, name=NAME, seconds=5.0):
    owner = new_owner_id(places)
    return owner, backend.acquire(name, owner, 30.0, '{"host": "h", "pid": 1}', within(seconds))


def shares(postgres):
    [(count,)] = postgres.query(SHARE_MODE)
    return count


def test_what_has_ended_leaves_nothing_at_the_server_although_the_session_goes_on(backend, other, postgres):
    keeps, _ = acquire(backend, "angee:name:another")
    for places in (2, SHARED):
        first, second = enter(backend, places), enter(backend, places)
        assert first[1] and second[1]
        assert acquire(other)[1] is None
        assert backend.release(NAME, first[0], within())
        assert acquire(other)[1] is None, "the second one is still there"
        assert backend.release(NAME, second[0], within())
        assert shares(postgres) == 0
        assert locks(postgres) == believed(backend)
        owner, grant = acquire(other)
        assert grant
        assert enter(backend, places)[1] is None
        assert other.release(NAME, owner, within())
    assert backend.release("angee:name:another", keeps, within())


def test_the_session_of_a_process_does_not_let_itself_in_twice(backend, postgres):
    """The server would: all holds of a process are one session's."""
    placed = [enter(backend, 2) for _ in range(3)]
    assert [grant and grant.place for _, grant in placed] == [0, 1, None]
    assert acquire(backend)[1] is None
    for owner, grant in placed:
        assert backend.release(NAME, owner, within()) is (grant is not None)
    owner, grant = acquire(backend)
    assert grant
    for places in (1, 3, SHARED):
        assert enter(backend, places)[1] is None
    assert backend.release(NAME, owner, within())
    assert shares(postgres) == 0


def test_places_are_those_of_all_sessions(backend, other):
    mine, theirs = enter(backend, 3), enter(other, 3)
    third = enter(backend, 3)
    assert [each[1].place for each in (mine, theirs, third)] == [0, 1, 2]
    assert enter(other, 3)[1] is None
    assert backend.release(NAME, mine[0], within())
    assert enter(other, 3)[1].place == 0
    assert enter(backend, 4)[1].place == 3
    assert enter(backend, 2)[1] is None, "whoever names fewer places sees those of the others"


def test_of_many_threads_of_two_sessions_so_many_are_let_in(backend, other):
    inside = threading.Semaphore(2)

    def work(number):
        mine, entered = (backend, other)[number % 2], 0
        for _ in range(30):
            owner, grant = enter(mine, 2, seconds=20)
            if grant:
                entered += 1
                assert inside.acquire(blocking=False), "too many inside"
                inside.release()
                assert mine.release(NAME, owner, within(20))
        return entered

    assert sum(in_threads(6, work)) > 20


def held_by(backend):
    return [entry for entry in list(backend._session.entries.values()) if entry.gate and entry.granted]


def test_the_end_of_a_session_frees_its_places_at_once(backend, other, postgres):
    owners = [(NAME, enter(backend, 2)[0]) for _ in range(2)]
    assert enter(other, 2)[1] is None
    postgres.terminate(session_of(backend).server_pid)
    wait_for_the_end_of_sessions(backend)
    eventually(lambda: enter(other, 2)[1])
    assert watch(backend, *owners) == set()
    assert enter(backend, 2)[1].place == 1


def leave_word(waiting, backend):
    """As a waiter does that asks several times a second, until it keeps new shared holds out."""
    deadline = time.monotonic() + 10
    while enter(backend, SHARED)[1] is not None:
        waiting.remaining(NAME, within(), ALONE)
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_word_keeps_new_ones_out_until_its_waiter_has_been_in(backend, other, postgres):
    leave_word(other, backend)
    assert enter(backend, 200)[1] is None
    for entry in held_by(backend):
        assert backend.release(NAME, entry.owner, within())
    waiter, grant = acquire(other)
    assert grant
    assert other.release(NAME, waiter, within())
    assert enter(backend, SHARED)[1], "its word went with its turn"


def test_a_word_ends_by_itself(backend, other):
    leave_word(other, backend)
    started = time.monotonic()
    eventually(lambda: enter(backend, SHARED)[1], WANTED_SECONDS + 5)
    assert time.monotonic() - started < WANTED_SECONDS + 1.5


@pytest.fixture
def unanswered(monkeypatch):
    """The answer to the next request for a place does not come in time."""
    real, answers = Session.execute, [NoAnswer(sent=True)]

    def execute(self, *args):
        rows = real(self, *args)
        if answers and args[0] is sql.JOIN:
            raise answers.pop()
        return rows

    monkeypatch.setattr(Session, "execute", execute)


@pytest.mark.parametrize("places", [2, SHARED])
def test_a_try_without_an_answer_leaves_nothing(backend, other, postgres, unanswered, places):
    """Its release finds what the server has granted to it, although no answer has told where."""
    keeps, _ = acquire(backend, "angee:name:another")
    owner = new_owner_id(places)
    with pytest.raises(LockBackendError):
        backend.acquire(NAME, owner, 30.0, "{}", within())
    assert acquire(other)[1] is None
    backend.release(NAME, owner, within())
    assert acquire(other)[1]
    assert shares(postgres) == 0
    assert backend.release("angee:name:another", keeps, within())


def test_an_answer_that_is_still_out_keeps_exclusive_tries_of_this_process_out(direct, unanswered):
    """The server would let them in, since it is the same session that may have the place."""
    owner = new_owner_id(SHARED)
    with pytest.raises(LockBackendError) as caught:
        direct.acquire(NAME, owner, 30.0, "{}", within())
    assert caught.value.uncertain
    with pytest.raises(LockBackendError, match="not answered yet"):
        acquire(direct, seconds=0.5)
    assert direct.release(NAME, owner, within()) is False
    assert acquire(direct)[1]


@pytest.mark.parametrize("places", [2, SHARED])
def test_a_statement_that_fails_after_it_has_locked_keeps_nothing(direct, postgres, places):
    keeps, _ = acquire(direct, "angee:name:another")
    postgres.query("ALTER SEQUENCE angee_jobs_fencing_token RENAME TO hidden")
    try:
        for _ in range(3):
            with pytest.raises(LockBackendError):
                enter(direct, places)
        assert shares(postgres) == 0
        assert locks(postgres) == believed(direct)
    finally:
        postgres.query("ALTER SEQUENCE hidden RENAME TO angee_jobs_fencing_token")
    assert direct.release("angee:name:another", keeps, within())


def test_what_is_known_of_a_key_goes_with_its_last_hold(backend):
    keeps, _ = acquire(backend, "angee:name:another")
    for number in range(20):
        owner, grant = enter(backend, 2, f"angee:name:{number}")
        assert grant
        assert backend.release(f"angee:name:{number}", owner, within())
    assert backend._session.gates == {}
    assert backend.release("angee:name:another", keeps, within())
