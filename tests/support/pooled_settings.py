"""The settings of the test suite with an alias that PgBouncer serves in session mode, and session locks on it."""

from tests import settings
from tests.settings import *  # noqa: F403

if settings.HAS_PGBOUNCER:
    HOST_AND_PORT = {"HOST": str(settings.PGBOUNCER_SESSION_DIR), "PORT": str(settings.PGBOUNCER_PORT)}
    DATABASES = settings.DATABASES | {"pooled": settings.DATABASES["postgres"] | HOST_AND_PORT}
    ANGEE_JOBS_LOCKS = settings.ANGEE_JOBS_LOCKS | {
        "pooled_advisory": {
            "BACKEND": "angee_jobs.locks.PostgresAdvisoryLockBackend",
            "OPTIONS": {"alias": "pooled"},
        }
    }
