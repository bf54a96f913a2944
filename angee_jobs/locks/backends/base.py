"""What a backend is: a few operations, each of them atomic at the storage.

The policy (waiting, renewal, loss, transactions) is in the modules above, ``acquiring.py`` first of all, once for
all backends. A backend only knows how to grant, extend, end, show and remove holds. The operations stand in every
backend in the order in which they stand here, so that backends can be read side by side.

Rules for every operation:

* It takes ``deadline``, a moment on :func:`angee_jobs.locks.clock.now`, and returns or raises by then, whatever
  the server does.
* It raises :class:`LockBackendError` when the storage cannot be reached or used, or gave no answer in time; the
  driver's error is its cause. It never reports that as a refusal, nor a refusal as an error.
* Whether a hold has expired is decided by the storage's clock alone.
* It may be called from any thread, and interrupted at any instruction by an exception of a signal handler. The
  backend is usable afterwards; ``release`` with the same owner id undoes what the interrupted operation did.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from .. import clock
from ..errors import LockBackendError
from ..holder import parse_holder
from ..keys import LockKey, as_lock_key
from ..types import HIDDEN, LockHandle, LockInfo

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

#: How long an operation may take when its caller set no tighter limit, in seconds.
OPERATION_SECONDS = 5.0
#: Who else may hold a key beside a hold: nobody, other shared holds, or (a positive number) so many that have a place.
ALONE, SHARED = 0, -1
#: No engine has more places for one key.
MOST_PLACES = 1000
#: For how long an exclusive waiter's word keeps new shared and placed holds back, in seconds; it asks again sooner.
WANTED_SECONDS = 3.0
#: Of times that can be shown, in seconds before and after 1970: nothing near the ends of the calendar.
_LAST_SECOND = 1900 * 366 * 24 * 3600.0


@dataclasses.dataclass(slots=True)
class Grant:
    """What a successful acquire brings back: ``fencing_token``, ``acquired_at``, ``expires_at``, ``place``.

    Times are seconds since the epoch by the backend's clock, None where they cannot be known, as the token can.
    ``place`` counts from 0; None for a hold that has none.
    """

    fencing_token: int | None
    acquired_at: float | None = None
    expires_at: float | None = None
    place: int | None = None


@dataclasses.dataclass(slots=True)
class Extension:
    """One lease in a batch to extend, of ``owner`` on ``name``: for ``ttl`` seconds from now by the backend's clock."""

    name: str
    owner: str = dataclasses.field(repr=False)
    ttl: float


@dataclasses.dataclass(slots=True)
class Record:
    """One hold as found at the storage: ``name``, ``holder``, ``acquired_at``, ``expires_at``, ``expires_in``,
    ``fencing_token``, ``place``.

    ``holder`` is the text that ``acquire`` was given. ``acquired_at`` and ``expires_at`` are seconds since the epoch,
    ``expires_in`` is in seconds from now, None for a session lock, negative if expired.
    """

    name: str
    holder: str | None
    acquired_at: float | None
    expires_at: float | None
    expires_in: float | None
    fencing_token: int | None
    place: int | None = None


class BaseLockBackend:
    """Base of the backends that come with this package, and a good one for others.

    A subclass states what it is by the class attributes and implements the operations.
    """

    #: Whether exclusion reaches other processes.
    cross_process: bool = True
    #: Whether a hold is a lease (ends by itself, is renewed), or lives as long as a server connection.
    leases: ClassVar[bool] = True
    #: Whether a waiter is told of a release in another process (True), or has to look again and again. None: there
    #: is no other process to hear of.
    push: bool | None = True
    #: At most this many leases go into one ``extend``.
    extend_batch: ClassVar[int] = 500

    #: For how many holds of a key at once it has places, and whether it has shared ones; 0: it only excludes.
    most_places: ClassVar[int] = 0
    #: Whether it can tell who holds a lock.
    inspectable: ClassVar[bool] = True

    #: Makes a :class:`Lock`. The policy, which stands above the backends, puts it here.
    make_lock: ClassVar[Callable[..., Any]]

    #: The alias in ANGEE_JOBS_LOCKS; set by the handler that makes the instance.
    alias: str = "default"
    #: The "NAMESPACE" of the alias, or what tells it at each use: part of every canonical name.
    namespace: str | Callable[[], str] = ""
    #: The length of a lease in seconds where the lock names none.
    ttl: float = 30.0

    # The operations.

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        """Take ``name`` for ``owner``, now and without waiting; None if refused.

        What ``places_of(owner)`` says decides whom that excludes: a hold that is ALONE everybody, one that is SHARED or
        has a place those that are ALONE. A place is the lowest free one among the first so many. While an exclusive
        waiter's word stands (see :meth:`remaining`), shared and placed holds are refused.
        """
        raise NotImplementedError

    def acquire_next(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        """Like :meth:`acquire`, for a waiter that will retry; may refuse while another request is in flight.

        Optional.
        """
        return self.acquire(name, owner, ttl, holder, deadline)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        """Extend the leases that are still held by their owner; the owner ids of those that were.

        An expired lease stays expired, also when nobody has taken it over. A session backend has nothing to
        extend: it tells which of the holds are still alive, without asking the server. Where one lease cannot be
        extended and others were, the :class:`LockBackendError` names the latter in its ``extended``.
        """
        raise NotImplementedError

    def release(self, name: str, owner: str, deadline: float) -> bool:
        """End the hold of ``owner``; False if it had ended before.

        Also ends what an interrupted or unanswered ``acquire`` of the same owner may have been granted.
        """
        raise NotImplementedError

    def adopt(self, name: str, owner: str, new_owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        """Give the live hold of ``owner`` to ``new_owner``, in one step, so that it works once; None if it is gone."""
        raise LockBackendError(f"{type(self).__name__} cannot hand a hold to another process", name=name)

    def inspect(self, name: str, deadline: float) -> Record | None:
        """The live hold of ``name``, or None."""
        raise NotImplementedError

    def list_held(self, deadline: float) -> Iterator[Record]:
        """All live holds, in no particular order."""
        raise NotImplementedError

    def scan_held(self, fields: Sequence[str], deadline: float) -> Iterator[Sequence[tuple[Any, ...]]] | None:
        """Of all live holds, many at a time, the name and these ``fields``: where :meth:`list_held` reads too much.

        Optional. A field is ``holder``, ``acquired_at``, ``expires_in`` or ``fencing_token``, as in :class:`Record`.
        Each hold comes once. None: this backend has no such operation, and its records are read instead.
        """
        return None

    def inspect_many(self, names: Sequence[str], deadline: float) -> list[Record]:
        """All live holds of ``names``, in any order."""
        return [record for name in names if (record := self.inspect(name, deadline)) is not None]

    def list_expired(self, grace: float, deadline: float) -> Iterator[Record]:
        """What a reap would remove now."""
        return iter(())

    def reap(self, grace: float, batch_size: int, deadline: float) -> int:
        """Remove at most ``batch_size`` holds that expired more than ``grace`` seconds ago; how many were."""
        return 0

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        """End all holds of ``name`` whoever owns them; one that was ended, or None.

        With ``fencing_token`` only that hold: one with another token is left alone, in the same step that would end it.
        """
        raise NotImplementedError

    def remaining(self, name: str, deadline: float, places: int = ALONE) -> float | None:
        """For the process's one waiter of ``name``: seconds until a hold that is in its way ends unless renewed.

        None if the lock may be free now. A backend that pushes also notes here that somebody waits, so that the
        release is told. A waiter that wants to be ALONE leaves word, which refuses new shared and placed holds for
        WANTED_SECONDS, unless it got the lock sooner.
        """
        record = self.inspect(name, deadline)
        return None if record is None else record.expires_in

    def wait_for_change(self, seconds: float) -> Collection[str] | None:
        """Sleep until locks may have come free, at most ``seconds``: their names; none after the time; None: any.

        Called again and again on one thread of the process while somebody waits.
        """
        raise NotImplementedError

    def stop_watching(self) -> None:
        """Nobody waits any more: give up what :meth:`wait_for_change` keeps, and make it return soon.

        Called from any thread, also while another is in :meth:`wait_for_change`, which may be called again later.
        """

    def close(self) -> None:
        """Give up the connections that carry no hold."""

    # System checks.

    def check(self) -> list[CheckMessage]:
        """What is wrong with this backend's configuration, as far as that can be told without a connection."""
        return []

    def check_deployment(self) -> list[CheckMessage]:
        """What is wrong with the server, for ``manage.py check --deploy``. Asks it, and says so if it cannot."""
        return []

    def check_database(self, databases: Collection[str]) -> list[CheckMessage]:
        """The same with one: for ``manage.py check --database``, and ``migrate``. An error would stop the latter."""
        return []

    # The protocol that third-party code may use directly; all other access goes through Lock.

    def try_acquire(self, key: LockKey | str, *, timeout: timedelta | None = None) -> LockHandle | None:
        """A :class:`Lock` that holds ``key``, or None if somebody else does after ``timeout``."""
        lock = self.make_lock(key, backend=self)
        return lock if lock.acquire(timeout) else None

    def is_held(self, key: LockKey | str) -> bool:
        """Whether somebody holds ``key`` now."""
        return self.inspect(self.scoped(as_lock_key(key)).name, clock.now() + OPERATION_SECONDS) is not None

    # Shared by the backends.

    #: The wait queues of this process for this backend, which the policy makes with the first waiter.
    waiters: Any = None

    def scoped(self, key: LockKey) -> LockKey:
        """``key`` in the namespace of this alias, unless it has one already, as a canonical name may."""
        scope = self.namespace if isinstance(self.namespace, str) else self.namespace()
        return key if key.scope or not scope else LockKey(key.namespace, key.parts, scope)

    def changed(self, name: str | None) -> None:
        """``name`` may have come free, or any lock if it is None: wake the waiters of this process."""
        if self.waiters is not None:
            self.waiters.changed(name)

    def info(self, record: Record, owner_id: str = HIDDEN) -> LockInfo:
        """The public form of a record."""
        holder = parse_holder(record.holder)
        places = ALONE if holder is None else holder.places
        return LockInfo(
            name=record.name,
            owner_id=owner_id,
            holder=holder,
            acquired_at=to_datetime(record.acquired_at),
            expires_at=to_datetime(record.expires_at),
            fencing_token=record.fencing_token,
            backend=self.alias,
            slot=record.place,
            slots=places if record.place is not None and places > 0 else None,
            shared=places == SHARED,
        )


def to_datetime(seconds: float | None) -> datetime | None:
    """Seconds since the epoch as an aware datetime; None also for what somebody wrote by hand to mean "for ever".

    That is what no calendar has, or what has no room for a time zone at its end.
    """
    if seconds is None or not abs(seconds) < _LAST_SECOND:
        return None
    return datetime.fromtimestamp(seconds, UTC)


def finite(value: object) -> float | None:
    """``value`` if it is a number that can be counted with. Rows can be edited by hand."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def owner_digest(owner: str) -> str:
    """What a storage on a server or in a file knows of an owner id: to read it there, or in a log, releases nothing."""
    digest: str | None = getattr(owner, "digest", None)
    return hashlib.sha256(owner.encode()).hexdigest() if digest is None else digest


def places_of(owner: str) -> int:
    """ALONE, SHARED or the number of places: the end of an owner id says how its hold shares the key.

    So what is attached, extended or released by its owner id alone is found where it is kept.
    """
    kind = owner.partition("~")[2]
    return SHARED if kind == "shared" else int(kind) if kind.isdecimal() and len(kind) <= 4 else ALONE


def is_member(owner: str) -> bool:
    """Whether the hold of an owner id is a shared or placed one. Of an exclusive one it costs next to nothing."""
    return "~" in owner and places_of(owner) != ALONE


def extend_each_kind(
    extensions: Sequence[Extension],
    alone: Callable[[Sequence[Extension]], Collection[str]],
    members: Callable[[Sequence[Extension]], Collection[str]],
) -> Collection[str]:
    """``extend()`` where exclusive holds and the others take a request each: the owner ids that either has extended.

    If one fails, the other is made all the same, and what was extended is told by the error.
    """
    kinds = (
        [each for each in extensions if not is_member(each.owner)],
        [each for each in extensions if is_member(each.owner)],
    )
    extended: list[str] = []
    failure: LockBackendError | None = None
    for batch, extend in zip(kinds, (alone, members), strict=True):
        try:
            extended += extend(batch) if batch else ()
        except LockBackendError as error:
            extended += error.extended
            failure = failure or error
    if failure is not None:
        failure.extended = extended
        raise failure
    return extended
