"""The entry of ``CACHES`` that a Redis backend uses: what is wrong with it, the locks' prefix, and its pool."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from typing import Any

from django.core.exceptions import ImproperlyConfigured


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why a cache cannot serve, as a system check says it."""

    id: str
    text: str
    hint: str


class CacheAlias:
    """One alias. Nothing is imported or looked at before it is needed."""

    def __init__(self, alias: str) -> None:
        self.alias: Any = alias  # whatever the setting says
        self._pool: Any = None
        self._own_prefix: str | None = None

    def __str__(self) -> str:
        return f"The server of the cache {self.alias!r}"

    def pool(self) -> Any:
        """The cache's pool of redis-py, for its class and arguments of connections; ImproperlyConfigured if none."""
        if self._pool is None:
            from django.core.cache import caches

            problem = self.problem()
            if problem is not None:
                raise ImproperlyConfigured(f"RedisLockBackend: {problem.text} {problem.hint}")
            # Not caches[alias], which belongs to a thread, and is closed at the end of its request.
            cache: Any = caches.create_connection(self.alias)
            client = cache.client if hasattr(cache, "client") else cache._cache  # django-redis, Django
            self._pool = client.get_client(write=True).connection_pool
        return self._pool

    def _entry(self) -> object:
        from django.conf import settings

        return settings.CACHES.get(self.alias) if isinstance(self.alias, str) else None

    def prefix(self) -> str:
        """What the keys and channels of the cache's locks begin with.

        Its KEY_PREFIX and VERSION, so that two projects on one server stay apart; not its KEY_FUNCTION, which may
        depend on the request or the tenant, while a lease is renewed by a thread that knows neither. In a test run also
        that run's name, which may change while tests are set up. The braces make it a hash tag: all keys are in one
        slot.
        """
        if self._own_prefix is None:
            found: Any = self._entry()
            entry: dict[str, Any] = found if isinstance(found, dict) else {}
            self._own_prefix = f"{entry.get('KEY_PREFIX', '')}:{entry.get('VERSION', 1)}"
        run = name_of_test_run()
        tag = f"{self._own_prefix}:{run}" if run else self._own_prefix
        return "{" + tag.replace("{", "%7B").replace("}", "%7D") + ":angee-locks}:"

    def problem(self) -> Problem | None:
        """What is wrong with the configuration, as far as that can be told without a connection."""
        from django.conf import settings
        from django.utils.module_loading import import_string

        entry = self._entry()
        if not isinstance(entry, dict):
            return Problem(
                "angee_jobs.E020",
                f"There is no cache {self.alias!r} in CACHES.",
                f"It has {', '.join(map(repr, settings.CACHES))}: name one that is a Redis cache in the option "
                f'"cache" of the lock backend.',
            )
        path = str(entry.get("BACKEND", ""))
        needs = ["redis", "django_redis"] if path.startswith("django_redis.") else ["redis"]
        missing = [name.replace("_", "-") for name in needs if importlib.util.find_spec(name) is None]
        if missing:
            return Problem(
                "angee_jobs.E021",
                f"The cache {self.alias!r} needs {' and '.join(missing)}, which cannot be imported.",
                "Install the extra: pip install angee-jobs[redis]",
            )
        try:
            cache_class = import_string(path)
        except (ImportError, ValueError, TypeError) as error:  # the others for a path such as ".name"
            return Problem(
                "angee_jobs.E020",
                f"The class of the cache {self.alias!r}, {path!r}, cannot be imported: {error}.",
                "Correct its BACKEND.",
            )
        from django.core.cache.backends.redis import RedisCache

        if isinstance(cache_class, type) and issubclass(cache_class, RedisCache):
            return None
        if importlib.util.find_spec("django_redis") is not None:
            other_class = import_string("django_redis.cache.RedisCache")
            if isinstance(cache_class, type) and issubclass(cache_class, other_class):
                return self._problem_of_client(entry.get("OPTIONS") or {})
        return Problem(
            "angee_jobs.E020",
            f"The cache {self.alias!r} is a {path}, which is not a Redis cache.",
            'Use "django_redis.cache.RedisCache" or "django.core.cache.backends.redis.RedisCache", in an alias of its '
            "own if need be.",
        )

    def _problem_of_client(self, options: dict[str, Any]) -> Problem | None:
        """Whether django-redis talks to one server."""
        import redis
        from django.utils.module_loading import import_string

        default_client = import_string("django_redis.client.DefaultClient")
        sharded_client = import_string("django_redis.client.ShardClient")
        client_path = options.get("CLIENT_CLASS", "django_redis.client.DefaultClient")
        redis_path = options.get("REDIS_CLIENT_CLASS", "redis.client.Redis")
        try:
            client_class, redis_class = import_string(client_path), import_string(redis_path)
        except ImportError as error:
            return Problem(
                "angee_jobs.E020", f"The cache {self.alias!r} cannot be used: {error}.", "Correct its OPTIONS."
            )
        wrong = ""
        if not issubclass(client_class, default_client) or issubclass(client_class, sharded_client):
            wrong = client_path
        elif not issubclass(redis_class, redis.Redis):
            wrong = redis_path
        if not wrong:
            return None
        return Problem(
            "angee_jobs.E022",
            f"The cache {self.alias!r} is spread over several servers by {wrong}, and a lock must be on one.",
            "Add an alias to CACHES that names one server, with the default CLIENT_CLASS, and use it for locks.",
        )


def name_of_test_run() -> str:
    """What tells this test run, or this worker of it, from others on one server; empty outside of tests.

    The worker of pytest-xdist, whose environment the processes have that its tests start; else the test database. Many
    workers of ``manage.py test --parallel`` have one database in memory, of that name, so their number goes with it.
    """
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    if name:
        name = f"{name}-{os.environ.get('PYTEST_XDIST_TESTRUNUID', '')[:8]}"
    else:
        name = _test_database()
    worker = getattr(sys.modules.get("django.test.runner"), "_worker_id", 0)
    return f"{name}-{worker}" if worker else name


def _test_database() -> str:
    """The name of the database that Django's test runner has put into the settings, if it has."""
    from django.conf import settings

    databases: dict[str, Any] = settings.DATABASES
    for alias in sorted(databases, key=lambda alias: (alias != "default", alias)):
        entry = databases[alias]
        name, wanted = str(entry.get("NAME") or ""), str((entry.get("TEST") or {}).get("NAME") or "")
        if (
            os.path.basename(name).startswith("test_")
            or name.startswith("file:memorydb_")
            or (wanted and name.startswith(os.path.splitext(wanted)[0]))
        ):
            return name
    return ""
