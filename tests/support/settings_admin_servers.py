"""The suite's settings for the holders that tests/admin/test_page_servers.py looks at from outside."""

from tests.settings import *  # noqa: F403
from tests.settings import ANGEE_JOBS_LOCKS

ANGEE_JOBS_LOCKS = ANGEE_JOBS_LOCKS | {
    "advisory": {"BACKEND": "angee_jobs.locks.PostgresAdvisoryLockBackend", "OPTIONS": {"alias": "postgres"}},
    "table": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "postgres"}},
}
