"""Sessions with a real PostgreSQL, below the backends: deadlines, interrupts, connections that die."""

import time

import pytest

from angee_jobs.locks.backends.postgres import session as pg
from angee_jobs.locks.backends.postgres.errors import NoAnswer, SessionLost
from angee_jobs.locks.backends.postgres.session import Session
from tests.support.pg_helpers import (
    ECHO,
    SLEEP,
    WAIT,
    Interrupt,
    ended_in_mid_query,
    held_up,
    interrupted_after,
    session,
    within,
)

__all__ = ["session"]


# Deadlines.


def test_connecting_has_a_deadline(postgres):
    before = set(pg._sessions)  # those of earlier tests
    with postgres.hanging():
        started = time.monotonic()
        with pytest.raises(NoAnswer) as caught:
            Session("postgres", within(0.3))
        assert 0.2 < time.monotonic() - started < 2.3
        assert not caught.value.sent
    assert not set(pg._sessions) - before


def test_an_answer_that_is_late_is_read_before_the_next_request(session, postgres):
    for _ in range(2):
        session.execute(WAIT, [], within())  # and is prepared now
    for _ in range(50):
        with held_up(postgres):
            with pytest.raises(NoAnswer) as caught:
                session.execute(WAIT, [], within(0.01))
            assert caught.value.sent
            assert session.busy
        assert session.execute(ECHO, ["next"], within())[0][0] == b"next"


def test_a_server_that_hangs(session, postgres):
    with postgres.hanging():
        for sent in (True, False, False):
            started = time.monotonic()
            with pytest.raises(NoAnswer) as caught:
                session.execute(ECHO, ["x" * 1_000_000], within(0.2))
            assert caught.value.sent is sent  # the later ones found the answer to the first one outstanding
            assert time.monotonic() - started < 2.2
    assert session.execute(ECHO, ["back"], within())[0][0] == b"back"


def test_thousands_of_deadlines_of_a_millisecond(session):
    late = 0
    for number in range(3000):
        try:
            if number % 50 == 0:  # late for certain, on however fast a machine
                session.execute(SLEEP, [0.02], within(0.001))
            assert session.execute(ECHO, [number], within(0.0001 * (number % 10)))[0][0] == str(number).encode()
        except NoAnswer:
            late += 1
    assert late > 20
    assert session.execute(ECHO, ["end"], within())[0][0] == b"end"


# Interrupts.


def test_interrupts_in_mid_query(session):
    struck = 0
    for number in range(500):
        try:
            with interrupted_after(0.0001 + 0.00001 * (number % 100)):
                for _ in range(50):
                    session.execute(ECHO, [number], within())
        except Interrupt:
            struck += 1
        assert session.execute(ECHO, [f"after {number}"], within())[0][0] == f"after {number}".encode()
    assert struck > 100


def test_a_signal_handler_may_use_the_same_session(session):
    inner = []

    def handler():
        inner.append(session.execute(ECHO, ["inner"], within())[0][0])

    for number in range(400):
        with interrupted_after(0.0001 + 0.00001 * (number % 100), handler):
            for at in range(2000):  # until it strikes
                answer = session.execute(ECHO, [f"{number}/{at}"], within())
                assert answer[0][0] == f"{number}/{at}".encode()
                if len(inner) > number:
                    break
    assert len(inner) == 400
    assert set(inner) == {b"inner"}


# Connections that die.


def test_a_session_that_died_while_idle_is_found_dead_before_anything_is_sent(session, postgres):
    assert postgres.terminate(session.server_pid)
    with pytest.raises(SessionLost) as caught:
        session.execute(ECHO, ["x"], within())
    assert not caught.value.sent


def test_a_session_that_dies_in_mid_query(session, postgres):
    with held_up(postgres) as stranger:
        thread = ended_in_mid_query(postgres, session.server_pid, stranger)
        with pytest.raises(SessionLost) as caught:
            session.execute(WAIT, [], within(20))
        thread.join(10)
    assert caught.value.sent
    assert not session.open
