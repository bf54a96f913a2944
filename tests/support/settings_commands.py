"""The suite's settings for the commands that its tests run: two lock backends, and one that cannot be reached."""

from tests.settings import *  # noqa: F403
from tests.settings import TEST_DIR

ANGEE_JOBS_LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "other", "ttl": 30}},
    "local": {"BACKEND": "angee_jobs.locks.LocalLockBackend"},
}

import json  # noqa: E402
import os  # noqa: E402

if os.environ.get("ANGEE_JOBS_TEST_LOGGING"):
    LOGGING = json.loads(os.environ["ANGEE_JOBS_TEST_LOGGING"])

if os.environ.get("ANGEE_JOBS_TEST_DOWN"):
    DATABASES["down"] = {  # noqa: F405
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(TEST_DIR / "no-such-folder" / "down.sqlite3"),
    }
    ANGEE_JOBS_LOCKS["down"] = {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "down"}}
