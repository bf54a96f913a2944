"""What `angee_jobs.locks` gives to those who import it, and what that costs."""

import subprocess
import sys
from pathlib import Path

import angee_jobs.locks
from angee_jobs.locks import testing

ROOT = Path(__file__).parents[2]

#: The public names of the design, as far as they are built.
NAMES = {
    "LockKey",
    "record_lock_key",
    "instance_lock_key",
    "LockHandle",
    "LockBackend",
    "task_lock",
    "lock",
    "Lock",
    "locked",
    "task_lock_is_held",
    "task_locks_are_cross_process",
    "lock_info",
    "held_locks",
    "force_release",
    "reap_expired_locks",
    "LockInfo",
    "get_lock_backend",
    "lock_backends",
    "LockError",
    "LockNotAcquiredError",
    "LockLostError",
    "LockBackendError",
    "lock_acquired",
    "lock_refused",
    "lock_released",
    "lock_lost",
    "locks_reaped",
    "LocalLockBackend",
    "TableLockBackend",
}
LATER = {"attach_lock", "PostgresAdvisoryLockBackend", "RedisLockBackend"}


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_complete():
    public = set(angee_jobs.locks.__all__)
    assert len(public) == len(angee_jobs.locks.__all__)
    assert public >= NAMES
    assert public <= NAMES | LATER
    assert all(getattr(angee_jobs.locks, name).__doc__ for name in public - {"lock_backends"})


def test_a_star_import_gives_every_name():
    names = python("from angee_jobs.locks import *; print(*(name for name in dir() if not name.startswith('__')))")
    assert set(names.split()) == set(angee_jobs.locks.__all__)


def test_importing_touches_no_database_network_or_driver():
    """Nor the settings: there are none in this process."""
    python(
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError('touched')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from angee_jobs.locks import *\n"
        "drivers = {'psycopg', 'psycopg2', 'redis', 'django_redis', 'sqlite3', '_sqlite3', 'MySQLdb'}\n"
        "assert not drivers & set(sys.modules), drivers & set(sys.modules)\n"
        "import threading; assert threading.active_count() == 1\n"
        "from django.conf import settings; assert not settings.configured\n"
    )


def test_backends_can_be_named_without_their_drivers():
    python(
        "import sys\n"
        "for driver in ('psycopg', 'psycopg2', 'redis', 'django_redis'): sys.modules[driver] = None\n"
        "from angee_jobs.locks import *\n"
        "from angee_jobs.locks import testing\n"
    )


def test_the_contract_can_be_imported_without_pytest_or_settings():
    python("import sys; sys.modules['pytest'] = None\nfrom angee_jobs.locks.testing import LockContract, Strategy\n")


def test_no_part_of_the_contract_hides_a_test_of_another():
    seen = {}
    for part in testing.LockContract.__mro__:
        for name in vars(part):
            if name.startswith("test_"):
                assert name not in seen, f"{name} is in {part} and {seen[name]}"
                seen[name] = part
    assert len(seen) > 100
