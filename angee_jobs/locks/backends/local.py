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
from .base import (
    ALONE,
    MOST_PLACES,
    SHARED,
    WANTED_SECONDS,
    BaseLockBackend,
    Extension,
    Grant,
    Record,
    places_of,
)


@dataclasses.dataclass(slots=True)
class _Lease:
    owner: str = dataclasses.field(repr=False)
    holder: str
    acquired_at: float
    expires: float  # on the local clock
    fencing_token: int
    place: int | None = None


class LocalLockBackend(BaseLockBackend):
    """Excludes threads and coroutines of this process, and nobody else; says so by ``cross_process = False``.

    Two aliases of it do not exclude each other either: each has its own locks. For tests, and for a program that is one
    process. Holds are leases as in the lock table, so that code which forgets to renew fails here as it would there.

    Example::

        ANGEE_JOBS_LOCKS = {"default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"}}
    """

    cross_process = False
    push = None  # a release rings the waiters of its own process, and there are no others
    most_places = MOST_PLACES

    def __init__(self) -> None:
        self._last_token = 0
        self._begin()
        _instances.add(self)

    def _begin(self) -> None:
        self._leases: dict[str, list[_Lease]] = {}
        #: Until when an exclusive waiter's word keeps others back, on the local clock.
        self._wanted: dict[str, float] = {}
        # Re-entrant, since a signal handler that uses locks may interrupt this very thread in here.
        self._mutex = threading.RLock()

    def _live(self, name: str) -> list[_Lease]:
        now = clock.now()
        return [lease for lease in self._leases.get(name, ()) if now < lease.expires]

    def _owned(self, name: str, owner: str) -> _Lease | None:
        return next((lease for lease in self._live(name) if compare_digest(lease.owner, owner)), None)

    def _remove(self, name: str, gone: Collection[_Lease]) -> None:
        left = [lease for lease in self._leases.get(name, ()) if all(lease is not each for each in gone)]
        if left:
            self._leases[name] = left
        else:
            self._leases.pop(name, None)

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        places = places_of(owner) if "~" in owner else ALONE  # without the call nearly always
        with self._mutex:
            live = self._live(name)
            place = None
            if places == ALONE:
                if live:
                    return None
            else:
                if clock.now() < self._wanted.get(name, 0.0) or any(places_of(each.owner) == ALONE for each in live):
                    return None
                if any(compare_digest(each.owner, owner) for each in live):
                    return None  # as an exclusive owner is that asks again
                if places != SHARED:
                    taken = {each.place for each in live}
                    place = next((each for each in range(places) if each not in taken), None)
                    if place is None:
                        return None
            # One counter for all keys: it need not be kept for each. time_ns: across restarts, as far as it goes.
            self._last_token = max(self._last_token + 1, time.time_ns() // 1000)
            acquired_at = time.time()
            lease = _Lease(owner, holder, acquired_at, clock.now() + ttl, self._last_token, place)
            self._leases[name] = [*live, lease]
            if places == ALONE:
                self._wanted.pop(name, None)
            return Grant(self._last_token, acquired_at, acquired_at + ttl, place)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        extended = []
        with self._mutex:
            for each in extensions:
                lease = self._owned(each.name, each.owner)
                if lease is not None:
                    lease.expires = max(lease.expires, clock.now() + each.ttl)
                    extended.append(each.owner)
        return extended

    def release(self, name: LockKey | str, owner: str | None = None, deadline: float = math.inf) -> bool:
        """End the hold of ``owner``; False if it ended before. ``release(key)`` ends all of the key, whoever owns them.

        The short form is for code written for ``angee.jobs.locks``; other code calls force_release(), which also
        logs the release and tells the holder.
        """
        if owner is None:
            return self.force_release(self.scoped(as_lock_key(name)).name, deadline) is not None
        assert isinstance(name, str)  # canonical, as in every backend
        with self._mutex:
            lease = self._owned(name, owner)
            if lease is None:
                return False
            self._remove(name, [lease])
            return True

    def adopt(self, name: str, owner: str, new_owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        with self._mutex:
            lease = self._owned(name, owner)
            if lease is None:
                return None
            lease.owner, lease.holder, lease.expires = new_owner, holder, clock.now() + ttl
            return Grant(lease.fencing_token, lease.acquired_at, time.time() + ttl, lease.place)

    def _record(self, name: str, lease: _Lease) -> Record:
        left = lease.expires - clock.now()
        return Record(name, lease.holder, lease.acquired_at, time.time() + left, left, lease.fencing_token, lease.place)

    def inspect(self, name: str, deadline: float) -> Record | None:
        return next(iter(self.inspect_many([name], deadline)), None)

    def inspect_many(self, names: Sequence[str], deadline: float) -> list[Record]:
        with self._mutex:
            return [self._record(name, lease) for name in names for lease in self._live(name)]

    def list_held(self, deadline: float) -> Iterator[Record]:
        return (record for record in self._records() if record.expires_in is not None and record.expires_in > 0)

    def list_expired(self, grace: float, deadline: float) -> Iterator[Record]:
        return (record for record in self._records() if record.expires_in is not None and record.expires_in <= -grace)

    def _records(self) -> list[Record]:
        with self._mutex:
            return [self._record(name, lease) for name, leases in self._leases.items() for lease in leases]

    def reap(self, grace: float, batch_size: int, deadline: float) -> int:
        count = 0
        with self._mutex:
            for name, leases in list(self._leases.items()):
                over = [lease for lease in leases if lease.expires - clock.now() <= -grace][: batch_size - count]
                self._remove(name, over)
                count += len(over)
        return count

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        with self._mutex:
            ended = [each for each in self._live(name) if fencing_token in (None, each.fencing_token)]
            records = [self._record(name, each) for each in ended]
            self._remove(name, ended)
        return records[0] if records else None

    def remaining(self, name: str, deadline: float, places: int = ALONE) -> float | None:
        with self._mutex:
            now = clock.now()
            live = self._live(name)
            alone = [each for each in live if places_of(each.owner) == ALONE]
            if places == ALONE:
                if live and not alone:
                    until = max(self._wanted.get(name, 0.0), now + min(WANTED_SECONDS, deadline - now))
                    self._wanted = {each: end for each, end in self._wanted.items() if end > now} | {name: until}
                return max((each.expires - now for each in live), default=None)
            wanted = self._wanted.get(name, 0.0) - now
            ends = [wanted] if wanted > 0 else [each.expires - now for each in alone]
            if not ends and places != SHARED:
                held = [each.expires - now for each in live if each.place is not None and each.place < places]
                ends = held if len(held) >= places else []
            return min(ends, default=None)


_instances: weakref.WeakSet[LocalLockBackend] = weakref.WeakSet()


def _in_child() -> None:
    """A child holds nothing, also with an instance that was kept; the thread that had the mutex may not be in it."""
    for backend in list(_instances):
        backend._begin()


process.on_fork(in_child=_in_child)
