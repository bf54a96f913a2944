"""Locks inside this process: leases in a dict, by the process's own clock."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from hmac import compare_digest

from .. import clock, process
from ..keys import LockKey, as_lock_key
from .base import BaseLockBackend, Extension, Grant, Record


@dataclasses.dataclass(slots=True)
class _Lease:
    owner: str = dataclasses.field(repr=False)
    holder: str
    acquired_at: float
    expires: float  # on the local clock
    fencing_token: int


class LocalLockBackend(BaseLockBackend):
    """Excludes threads and coroutines of this process, and nobody else; says so by ``cross_process = False``.

    Two aliases of it do not exclude each other either: each has its own locks. For tests, and for a program that is one
    process. Holds are leases as in the lock table, so that code which forgets to renew fails here as it would there.

    Example::

        ANGEE_JOBS_LOCKS = {"default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"}}
    """

    cross_process = False
    push = None  # a release rings the waiters of its own process, and there are no others

    def __init__(self) -> None:
        self._last_token = 0
        self._begin()
        _instances.add(self)

    def _begin(self) -> None:
        self._leases: dict[str, _Lease] = {}
        # Re-entrant, since a signal handler that uses locks may interrupt this very thread in here.
        self._mutex = threading.RLock()

    def _live(self, name: str) -> _Lease | None:
        lease = self._leases.get(name)
        return lease if lease is not None and clock.now() < lease.expires else None

    def _grant(self, name: str, owner: str, ttl: float, holder: str) -> Grant:
        # One counter for all keys, so that it need not be kept per key. time_ns: across restarts, as far as it goes.
        self._last_token = max(self._last_token + 1, time.time_ns() // 1000)
        acquired_at = time.time()
        self._leases[name] = _Lease(owner, holder, acquired_at, clock.now() + ttl, self._last_token)
        return Grant(self._last_token, acquired_at, acquired_at + ttl)

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        with self._mutex:
            if self._live(name) is not None:
                return None
            return self._grant(name, owner, ttl, holder)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        extended = []
        with self._mutex:
            for each in extensions:
                lease = self._live(each.name)
                if lease is not None and compare_digest(lease.owner, each.owner):
                    lease.expires = max(lease.expires, clock.now() + each.ttl)
                    extended.append(each.owner)
        return extended

    def release(self, name: LockKey | str, owner: str | None = None, deadline: float = math.inf) -> bool:
        """End the hold of ``owner``; False if it ended before. ``release(key)`` ends the key's hold, whoever owns it.

        The short form is for code written for ``angee.jobs.locks``; other code calls force_release(), which also
        logs the release and tells the holder.
        """
        if owner is None:
            return self.force_release(self.scoped(as_lock_key(name)).name, deadline) is not None
        assert isinstance(name, str)  # canonical, as in every backend
        with self._mutex:
            lease = self._live(name)
            if lease is None or not compare_digest(lease.owner, owner):
                return False
            del self._leases[name]
            return True

    def adopt(self, name: str, owner: str, new_owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        with self._mutex:
            lease = self._live(name)
            if lease is None or not compare_digest(lease.owner, owner):
                return None
            lease.owner, lease.holder, lease.expires = new_owner, holder, clock.now() + ttl
            return Grant(lease.fencing_token, lease.acquired_at, time.time() + ttl)

    def _record(self, name: str, lease: _Lease) -> Record:
        left = lease.expires - clock.now()
        return Record(name, lease.holder, lease.acquired_at, time.time() + left, left, lease.fencing_token)

    def inspect(self, name: str, deadline: float) -> Record | None:
        with self._mutex:
            lease = self._live(name)
            return None if lease is None else self._record(name, lease)

    def list_held(self, deadline: float) -> Iterator[Record]:
        with self._mutex:
            records = [self._record(name, lease) for name, lease in self._leases.items()]
        return (record for record in records if record.expires_in is not None and record.expires_in > 0)

    def list_expired(self, grace: float, deadline: float) -> Iterator[Record]:
        with self._mutex:
            records = [self._record(name, lease) for name, lease in self._leases.items()]
        return (record for record in records if record.expires_in is not None and record.expires_in <= -grace)

    def reap(self, grace: float, batch_size: int, deadline: float) -> int:
        count = 0
        with self._mutex:
            for record in self.list_expired(grace, deadline):
                if count == batch_size:
                    break
                del self._leases[record.name]
                count += 1
        return count

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        with self._mutex:
            record = self.inspect(name, deadline)
            if record is None or fencing_token not in (None, record.fencing_token):
                return None
            del self._leases[name]
            return record


_instances: weakref.WeakSet[LocalLockBackend] = weakref.WeakSet()


def _in_child() -> None:
    """A child holds nothing, also with an instance that was kept; the thread that had the mutex may not be in it."""
    for backend in list(_instances):
        backend._begin()


process.on_fork(in_child=_in_child)
