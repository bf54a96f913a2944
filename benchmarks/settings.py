"""Django settings of the benchmark's processes: one SQLite file, PostgreSQL and Valkey below one directory."""

import os
from pathlib import Path

DIR = Path(os.environ["ANGEE_JOBS_BENCH_DIR"])
REDIS_PORT = int(os.environ.get("ANGEE_JOBS_BENCH_REDIS_PORT", "6379"))
POSTGRES_DIR, POSTGRES_PORT = DIR / "pg", 54329
SQLITE = DIR / "default.sqlite3"
REDIS_URL = f"redis://127.0.0.1:{REDIS_PORT}/0"

SECRET_KEY = "only-for-benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "angee_jobs"]
if os.environ.get("ANGEE_JOBS_BENCH_APPS"):
    INSTALLED_APPS += os.environ["ANGEE_JOBS_BENCH_APPS"].split(",")

DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(SQLITE)},
    "postgres": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "angee_tests",
        "USER": "postgres",
        "HOST": str(POSTGRES_DIR),
        "PORT": str(POSTGRES_PORT),
    },
}
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_URL}}

ANGEE_JOBS_LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"},
    "sqlite": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "default"}},
    "postgres": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "postgres"}},
    "advisory": {
        "BACKEND": "angee_jobs.locks.PostgresAdvisoryLockBackend",
        "OPTIONS": {"alias": "postgres"},
    },
    "redis": {"BACKEND": "angee_jobs.locks.RedisLockBackend", "OPTIONS": {"cache": "default"}},
}
