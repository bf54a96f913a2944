"""Settings of the processes under fire: the suite's own, with short leases and the planted bugs."""

import os

from tests.settings import *  # noqa: F403
from tests.settings import ANGEE_JOBS_LOCKS, DATABASES, HAS_POSTGRES, HAS_VALKEY, TEST_DIR

#: The length of a lease in seconds.
TTL = float(os.environ["ANGEE_JOBS_TORTURE_TTL"])

# In a folder of its own, which may be a small file system that is filled up.
DATABASES["sqlite"] = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": str(TEST_DIR / "sqlite" / "locked.sqlite3"),
    "OPTIONS": {"timeout": 2, "transaction_mode": "IMMEDIATE"},
}

ANGEE_JOBS_LOCKS["local"] = {"BACKEND": "angee_jobs.locks.LocalLockBackend"}
ANGEE_JOBS_LOCKS["sqlite"] = {
    "BACKEND": "angee_jobs.locks.TableLockBackend",
    "OPTIONS": {"alias": "sqlite", "ttl": TTL},
}
if HAS_POSTGRES:
    ANGEE_JOBS_LOCKS["postgres_table"]["OPTIONS"]["ttl"] = TTL
if HAS_VALKEY:
    ANGEE_JOBS_LOCKS["redis"]["OPTIONS"]["ttl"] = TTL

for _name, _class in {
    "no_owner_check": "NoOwnerCheck",
    "renewal_by_upsert": "RenewalByUpsert",
    "zero_rows_ignored": "ZeroRowsIgnored",
    "clients_clock": "ClientsClock",
    "refused_frees_anothers": "RefusedFreesAnothers",
}.items():
    ANGEE_JOBS_LOCKS[_name] = {
        "BACKEND": f"tests.torture.planted.{_class}",
        "OPTIONS": {"alias": "sqlite", "ttl": TTL},
    }
if HAS_POSTGRES:
    ANGEE_JOBS_LOCKS["unlock_false_ignored"] = {
        "BACKEND": "tests.torture.planted.UnlockFalseIgnored",
        "OPTIONS": {"alias": "postgres"},
    }
