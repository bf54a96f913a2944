"""A Redis server that lies, and keys that somebody has edited by hand."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.checks import CheckMessage
from hypothesis import given
from hypothesis import strategies as st

from angee_jobs.locks import (
    LockBackendError,
    LockError,
    LockKey,
    attach_lock,
    force_release,
    held_locks,
    lock,
    lock_info,
    reap_expired_locks,
    task_lock_is_held,
)
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.redis.backend import RedisLockBackend
from angee_jobs.locks.clock import now
from angee_jobs.locks.operations import expired_locks
from angee_jobs.locks.renewal import renewer
from tests.support.hostile import examples
from tests.support.redis_tools import DJANGO, backend_for, new_name, new_owner, url
from tests.support.servers import RespServer, eventually

#: What an operation has here, in seconds, and how much later it may end on a busy machine.
SHORT, LATE = 0.15, 2.0


class LyingServer:
    """Accepts connections, and sends ``answer`` to whatever is said. It counts its connections."""

    def __init__(self, answer: bytes = b"", *, honest_handshake: bool = True) -> None:
        self.answer = answer
        self.close_after = False
        self.honest_handshake = honest_handshake
        self.open = 0
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._truth = ""
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> LyingServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()
        self._hang_up()

    def become(self, path: str) -> None:
        """From now on, pass everything on to the true server."""
        self._truth = path
        self._hang_up()

    def _hang_up(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, connection: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX) as truth:
            truth.connect(self._truth)
            while True:
                ready, _, _ = select.select([connection, truth], [], [])
                for end in ready:
                    heard = end.recv(65536)
                    if not heard:
                        return
                    (truth if end is connection else connection).sendall(heard)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.add(connection)
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        self.open += 1
        try:
            with connection, contextlib.suppress(OSError):
                if self._truth:
                    self._pass_on(connection)
                    return
                while heard := connection.recv(65536):
                    commands = heard.count(b"\r\nCLIENT\r\n")
                    if commands and self.honest_handshake:
                        connection.sendall(b"+OK\r\n" * commands)
                        continue
                    self.requests += 1
                    connection.sendall(self.answer)
                    if self.close_after:
                        return
        finally:
            self._connections.discard(connection)
            self.open -= 1


def simple(value: Any) -> bytes:
    """A value in the protocol."""
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(simple, value))
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, int):
        return b":%d\r\n" % value
    return b"$-1\r\n"


HEAD = b"%016d" * 3 % (4_000_000_000_000_000, 7, 1)
HOLD = HEAD + b"0" * 64 + b'{"host": "h"}'
values = st.recursive(
    st.one_of(
        st.none(),
        st.integers(-(2**70), 2**70),
        st.binary(max_size=60),
        st.sampled_from(
            [
                b"0",
                b"1",
                b"17",
                HEAD,
                HOLD,
                b"9" * 16,
                b"-" + b"9" * 15,
                HOLD[:111],
                b"\xff" * 112,
                b"[]",
                b'["a", 1]',
                b"[" * 50,
            ]
        ),
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
honest = values.map(simple)
replies = st.one_of(
    honest,
    st.tuples(honest, st.integers(0, 40)).map(lambda cut: cut[0][: cut[1]]),
    st.tuples(honest, honest).map(b"".join),
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"-ERR no\r\n", b"-NOSCRIPT x\r\n", b"-READONLY x\r\n", b"-\r\n", b"-\xff\xfe\r\n", b"-OOM x\r\n",
            b"-BUSY x\r\n", b"$99999999999999999999\r\n", b"*99999999999\r\n", b"*-2\r\n", b"$" + b"9" * 5000 + b"\r\n",
            b"%2\r\n", b"_\r\n", b"*1\r\n" * 2000, b":1_0\r\n", b"HTTP/1.1 400 Bad\r\n\r\n", b"\x15\x03\x01\x00",
        ]
    ),
)  # fmt: skip


def operations(backend: RedisLockBackend) -> dict[str, Any]:
    name, owner = new_name(), new_owner()

    def soon() -> float:
        return now() + SHORT

    return {
        "acquire": lambda: backend.acquire(name, owner, 30, "", soon()),
        "extend": lambda: backend.extend([Extension(name, owner, 30)], soon()),
        "release": lambda: backend.release(name, owner, soon()),
        "adopt": lambda: backend.adopt(name, owner, "heir", 30, "", soon()),
        "inspect": lambda: backend.inspect(name, soon()),
        "list_held": lambda: next(iter(backend.list_held(soon())), None),
        "scan_held": lambda: next(iter(backend.scan_held(["holder"], soon())), None),
        "list_expired": lambda: next(iter(backend.list_expired(0, soon())), None),
        "reap": lambda: backend.reap(0, 5, soon()),
        "force_release": lambda: backend.force_release(name, soon()),
        "remaining": lambda: backend.remaining(name, soon()),
        "wait_for_change": lambda: backend.wait_for_change(SHORT),
    }


@pytest.fixture
def liar(request: pytest.FixtureRequest) -> Iterator[LyingServer]:
    pytest.importorskip("redis")
    with LyingServer() as server:
        yield server


@pytest.mark.once
def test_every_verb_of_a_server_that_lies(liar: LyingServer) -> None:
    """LockBackendError in time, unless what it said may be an answer; no connection more than there are requests."""
    cache = {"BACKEND": DJANGO, "LOCATION": f"redis://127.0.0.1:{liar.port}"}
    with backend_for(cache) as backend:

        @examples(40)
        @given(answer=replies, close=st.booleans(), operation=st.sampled_from(sorted(operations(backend))))
        def check(answer: bytes, close: bool, operation: str) -> None:
            liar.answer, liar.close_after = answer, close
            started = now()
            try:
                operations(backend)[operation]()
            except LockBackendError:
                pass
            assert now() - started < SHORT + LATE + (SHORT if operation == "wait_for_change" else 0)

        check()
        backend.stop_watching()
        backend.close()
        eventually(lambda: liar.open == 0, what="every connection is closed")


@pytest.mark.once
@pytest.mark.parametrize(
    "answer", [b"", b"+OK\r\n", b":1\r\n", b"*1\r\n", b"-ERR x\r\n", b"$5\r\nab", HEAD, b"\xff\r\n"], ids=repr
)
def test_a_lock_of_a_server_that_lies_from_the_first_word_on(answer: bytes) -> None:
    with LyingServer(answer, honest_handshake=False) as server:
        with backend_for({"BACKEND": DJANGO, "LOCATION": f"redis://127.0.0.1:{server.port}"}) as backend:
            made = lock("of a liar", backend="temporary")
            started = now()
            with pytest.raises(LockBackendError):
                made.acquire(timeout=SHORT)
            assert now() - started < SHORT + LATE
            assert not made.held and not made.lost
            with pytest.raises(LockBackendError):
                backend.inspect("angee:name:a", now() + SHORT)
            if answer.endswith(b"\r\n") and answer != b"*1\r\n":  # the check is more patient with what is not an end
                assert all(isinstance(found, CheckMessage) for found in backend.check_deployment())
            backend.stop_watching()
            backend.close()
            eventually(lambda: server.open <= 1, what="none but that of the renewal thread, which tries to release")


def test_afterwards_the_true_server_can_be_used(valkey: RespServer) -> None:
    """The address is the same; the true server answers there now."""
    with LyingServer(b"*1\r\n:0\r\n") as server:
        cache = {"BACKEND": DJANGO, "LOCATION": f"redis://127.0.0.1:{server.port}"}
        with backend_for(cache) as backend:
            with pytest.raises(LockBackendError), lock("billing", backend="temporary"):
                pytest.fail("the body ran")
            server.become(str(valkey.socket_path))
            with lock("billing", backend="temporary") as held:
                assert held.held and task_lock_is_held("billing", backend="temporary")
            assert not task_lock_is_held("billing", backend="temporary")
            assert list(held_locks(backend="temporary")) == []
            given_up = "what the lie may have granted is given up"
            eventually(lambda: backend not in {left.hold.backend for left in renewer._abandoned}, 20, what=given_up)
            backend.close()
        eventually(lambda: server.open == 0, what="every connection is closed")


# Keys that were edited by hand.

BROKEN = {
    "empty": b"",
    "short": HEAD,
    "no digits": b"x" * 150,
    "infinite": b"             inf" + HOLD[16:],
    "no number": b"             nan" + HOLD[16:],
    "negative": b"-000000000000001" + HOLD[16:],
    "hexadecimal": b"0x0fffffffffffff" + HOLD[16:],
    "no token": HOLD[:16] + b" " * 32 + HOLD[48:],
    "no holder": HOLD[:112],
    "odd holder": HOLD[:112] + b'{"host": "\\ud800", "pid": 1e999, "ttl": NaN}',
    "bytes": HOLD[:112] + b"\xff\xfe",
    "huge": b"9" * 16 + HOLD[16:],
}


def everything(key: str, at: str) -> None:
    """Each question and each operation: an answer or a documented error."""
    for call in (
        lambda: task_lock_is_held(key, backend=at),
        lambda: str(lock_info(key, backend=at)).encode(errors="backslashreplace"),
        lambda: list(held_locks(backend=at)),
        lambda: list(expired_locks(backend=at)),
        lambda: attach_lock(key, "someone", backend=at),
        lambda: lock(key, backend=at).acquire(0.05),
        lambda: reap_expired_locks(backend=at),
        lambda: force_release(key, backend=at),
    ):
        try:
            call()
        except LockError:
            pass


@pytest.mark.parametrize("what", [*BROKEN, "list", "set", "hash"])
def test_a_hold_that_was_edited(what: str, valkey: RespServer, request: pytest.FixtureRequest) -> None:
    with backend_for({"BACKEND": DJANGO, "LOCATION": url(valkey)}) as backend, valkey.connect() as client:
        stored = f"{backend.prefix}hold:{LockKey('name', ('edited',)).name}"
        mine = lock("edited", backend="temporary")
        assert mine.acquire()
        client.delete(stored)
        {"list": client.rpush, "set": client.sadd, "hash": lambda key, value: client.hset(key, value, value)}.get(
            what, lambda key, _: client.set(key, BROKEN[what])
        )(stored, "x")
        everything("edited", "temporary")
        try:
            assert mine.release() is False
        except LockBackendError:
            pass
        assert not mine.held
        with lock("another", backend="temporary"):  # one that cannot be read hides no other
            assert "angee:name:another" in {info.name for info in held_locks(backend="temporary")}


@pytest.mark.parametrize("what", ["index", "token", "index without holds", "holds without index", "odd scores"])
def test_what_stands_beside_the_holds_was_edited(what: str, valkey: RespServer) -> None:
    with backend_for({"BACKEND": DJANGO, "LOCATION": url(valkey)}) as backend, valkey.connect() as client:
        with lock("before", backend="temporary") as before:
            if what in ("index", "token"):
                client.delete(f"{backend.prefix}{what}")
                client.hset(f"{backend.prefix}{what}", "a", "b")
                if what == "token":
                    with pytest.raises(LockBackendError):
                        lock("edited", backend="temporary").acquire()
                    assert client.get(f"{backend.prefix}hold:angee:name:edited") is None, "nothing was acquired"
                everything("edited", "temporary")
                client.delete(f"{backend.prefix}{what}")
            elif what == "index without holds":
                client.zadd(f"{backend.prefix}index", {"angee:name:none": 4e15, b"\xff\xfe": 4e15, "": 4e15, "old": 1})
            elif what == "holds without index":
                client.delete(f"{backend.prefix}index")
            else:
                client.zadd(f"{backend.prefix}index", {"angee:name:before": "inf", "b": "-inf", "c": 0.5})
            everything("edited", "temporary")
            assert task_lock_is_held("before", backend="temporary")
            assert before.extend()
        with lock("edited", backend="temporary", timeout=10) as after:
            assert after.fencing_token > before.fencing_token
        reap_expired_locks(backend="temporary")
        assert list(held_locks(backend="temporary")) == []
