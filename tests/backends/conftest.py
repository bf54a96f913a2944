"""Backends for the tests of one engine."""

from collections.abc import Iterator

import pytest

from angee_jobs.locks import lock_backends
from angee_jobs.locks.backends.redis.backend import RedisLockBackend
from tests.support.servers import RespServer


def _redis_backend(alias: str) -> Iterator[RedisLockBackend]:
    backend = lock_backends[alias]
    assert isinstance(backend, RedisLockBackend)
    yield backend
    backend.stop_watching()
    backend.close()


@pytest.fixture(params=["redis", "django_redis"])
def each_redis_backend(request: pytest.FixtureRequest, valkey: RespServer) -> Iterator[RedisLockBackend]:
    """The backend over Django's cache, and the one over that of django-redis."""
    yield from _redis_backend(request.param)


@pytest.fixture
def redis_backend(valkey: RespServer) -> Iterator[RedisLockBackend]:
    yield from _redis_backend("redis")
