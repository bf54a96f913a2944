"""The public names. Importing them touches neither a database nor the network, nor a driver."""

from __future__ import annotations

from .api import attach_lock, lock, locked, task_lock
from .backends.advisory import PostgresAdvisoryLockBackend
from .backends.local import LocalLockBackend
from .backends.redis import RedisLockBackend
from .backends.table import TableLockBackend
from .conf import get_lock_backend, lock_backends
from .errors import LockBackendError, LockError, LockLostError, LockNotAcquiredError
from .keys import LockKey, instance_lock_key, record_lock_key
from .lock import Lock
from .operations import (
    force_release,
    held_locks,
    lock_info,
    reap_expired_locks,
    task_lock_is_held,
    task_locks_are_cross_process,
)
from .signals import lock_acquired, lock_lost, lock_refused, lock_released, locks_reaped
from .types import LockBackend, LockHandle, LockInfo

__all__ = [
    "LocalLockBackend",
    "Lock",
    "LockBackend",
    "LockBackendError",
    "LockError",
    "LockHandle",
    "LockInfo",
    "LockKey",
    "LockLostError",
    "LockNotAcquiredError",
    "PostgresAdvisoryLockBackend",
    "RedisLockBackend",
    "TableLockBackend",
    "attach_lock",
    "force_release",
    "get_lock_backend",
    "held_locks",
    "instance_lock_key",
    "lock",
    "lock_acquired",
    "lock_backends",
    "lock_info",
    "lock_lost",
    "lock_refused",
    "lock_released",
    "locked",
    "locks_reaped",
    "reap_expired_locks",
    "record_lock_key",
    "task_lock",
    "task_lock_is_held",
    "task_locks_are_cross_process",
]
