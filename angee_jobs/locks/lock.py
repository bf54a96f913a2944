"""``Lock``: what its users can ask of it. How it is acquired and released is in ``acquiring.py`` and ``block.py``."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from . import clock
from .acquiring import acquire, adopt, detach, extend, release
from .backends.base import OPERATION_SECONDS, BaseLockBackend
from .block import Entrance, Entry, aenter, enter
from .concurrency import Call, Operations, TaskWaker, ThreadWaker, arun, run
from .errors import LockLostError, lost_error
from .guard import GUARD_SECONDS, guard
from .hold import Hold, State
from .keys import LockKey, as_lock_key
from .misuse import awaited
from .options import DEFAULTS, LockOptions, Options, spelled_out
from .renewal import renewer
from .statement import aexit_of_statement, exit_of_statement
from .types import LockInfo, Seconds, lease_seconds, wait_seconds


class Lock:
    """A lock on one key: made by :func:`lock`, taken by ``with``, ``async with``, or :meth:`acquire`.

    It can be used again after a release or a loss, and by many threads and tasks at once, which it excludes like a
    ``threading.Lock``. Each of them has a hold of its own: what ``with ... as held`` yields speaks for the hold of that
    block and no other. The lock itself speaks for the caller's own hold, or else for the last one, so that it may
    be handed between threads. ``key`` is its :class:`LockKey`, ``name`` the canonical name of that. All requests raise
    :class:`LockBackendError` if the backend cannot be reached or gives no answer in time.
    """

    def __init__(self, key: LockKey | str, **options: Unpack[Options]) -> None:
        checked = LockOptions.checked(options) if options else DEFAULTS  # type: ignore[arg-type]
        self.key = as_lock_key(key)
        self._entrance = Entrance(self.key, checked)

    def __reduce_ex__(self, protocol: object) -> Any:
        # Two objects would have one hold.
        raise TypeError("A Lock cannot be copied or pickled. To hand its hold to another process, use detach().")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError('lock(...) is no decorator: write @locked("name"), with the same options')

    @property
    def name(self) -> str:
        """The canonical name of the key, in the namespace of the backend's alias."""
        return self._entrance.find_backend().scoped(self.key).name

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

        def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None: ...

        async def __aenter__(self) -> Self: ...

        async def __aexit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None: ...

    else:
        __enter__, __exit__ = enter, exit_of_statement
        __aenter__, __aexit__ = aenter, aexit_of_statement

    # Acquiring and releasing without a block.

    def acquire(self, timeout: Seconds | None = None) -> bool:
        """Take the lock; False if another holder has it. Starts no renewal, but tells a loss.

        ``timeout`` is the total wait in seconds, or a timedelta; without one, the lock's own, and without that one
        the lock is tried once, now. Also False if the caller holds the key already: locks are not re-entrant.

        Example::

            billing = lock("billing-run", ttl=60)
            if billing.acquire():
                try:
                    ...
                    billing.extend()
                finally:
                    billing.release()
        """
        entry = self._entrance.new_entry()
        try:
            return run(self._acquire(entry, timeout, ThreadWaker))
        except BaseException:
            entry.abandon()
            raise

    @awaited
    async def aacquire(self, timeout: Seconds | None = None) -> bool:  # noqa: ASYNC109  the total wait, as in acquire
        """:meth:`acquire` for a coroutine: waiting takes no thread, and a cancellation leaves nothing behind."""
        entry = self._entrance.new_entry()
        try:
            return await arun(self._acquire(entry, timeout, TaskWaker))
        except BaseException:
            entry.abandon()
            raise

    def _acquire(self, entry: Entry, timeout: Seconds | None, make_waker: Any) -> Operations[bool]:
        options, hold = self._entrance.options, entry.hold
        assert hold is not None
        wait = self._wait(timeout)
        if not (yield from acquire(hold, options, wait, make_waker, renews=False, raises=False)):
            return False
        self._entrance.remember(entry, [])
        return True

    def _wait(self, timeout: Seconds | None) -> float | None:
        return self._entrance.options.timeout if timeout is None else wait_seconds(timeout)

    def release(self) -> bool:
        """Release the hold now; False if there is none, or if it was lost.

        Frees the lock also where the end of a block would keep it until the transaction's commit.
        """
        return run(self._release())

    @awaited
    async def arelease(self) -> bool:
        """:meth:`release` for a coroutine."""
        return await arun(self._release())

    def _release(self) -> Operations[bool]:
        hold = self._hold
        return hold is not None and (yield from release(hold)) is State.RELEASED

    def extend(self, ttl: Seconds | None = None) -> bool:
        """Let the lease end ``ttl`` seconds from now (without one: the lock's own), or when it would have if later.

        False if the hold is gone. A session lock, which has no end to move, tells whether it still lives.
        """
        return run(self._extend(None if ttl is None else lease_seconds(ttl)))

    @awaited
    async def aextend(self, ttl: Seconds | None = None) -> bool:
        """:meth:`extend` for a coroutine."""
        return await arun(self._extend(None if ttl is None else lease_seconds(ttl)))

    def _extend(self, seconds: float | None) -> Operations[bool]:
        hold = self._hold
        return hold is not None and hold.live and (yield from extend(hold, seconds))

    def detach(self, ttl: Seconds | None = None) -> str:
        """Let go of the hold without freeing the lock; the owner id with which another process can attach it, once.

        Unless that is done within ``ttl`` seconds (without one: the lock's own), the lock comes free: choose it longer
        than the queue's delay. LockLostError if there is no hold; ImproperlyConfigured for a session lock, which
        cannot leave its process. The owner id is enough to release the lock: send it to the task, do not log it.

        Example::

            export = lock(f"export-{report.pk}", backend="leases")
            if export.acquire():
                make_report.enqueue(report.pk, export.detach(ttl=3600))
        """
        return run(self._detach(None if ttl is None else lease_seconds(ttl)))

    def _detach(self, seconds: float | None) -> Operations[str]:
        return detach(self._checked(), seconds, self._entrance.options.note)

    def _adopt(self, owner_id: str) -> None:
        """What :func:`attach_lock` does."""
        entry = self._entrance.new_entry()
        try:
            run(self._attach(entry, owner_id))
            self._entrance.attached = entry
            self._entrance.remember(entry, [])
        except BaseException:
            entry.abandon()
            raise

    def _attach(self, entry: Entry, owner_id: str) -> Operations[None]:
        assert entry.hold is not None
        return adopt(entry.hold, owner_id, self._entrance.options.note)

    # What is known of the hold.

    @property
    def _hold(self) -> Hold | None:
        """The hold that the caller means."""
        return self._entrance.current()

    @property
    def _holds(self) -> list[Hold]:
        hold = self._hold
        return [] if hold is None else [hold]

    @property
    def held(self) -> bool:
        """Whether this process holds the lock by this object, as far as it can know without asking."""
        hold = self._hold
        return hold is not None and hold.live

    @property
    def lost(self) -> bool:
        """Whether the hold ended without being released. False before the first hold, and after a release."""
        return _is_lost(self._hold)

    def check(self) -> None:
        """LockLostError unless the lock is held. Costs no request; call it between the steps of long work.

        Example::

            with lock("billing-run", ttl=30) as held:
                for batch in batches:
                    held.check()
                    send(batch)
        """
        self._checked()

    def _checked(self, hold: Hold | None = None) -> Hold:
        hold = hold or self._hold
        if hold is not None and hold.live:
            return hold
        if _is_lost(hold):
            raise lost_error(hold.name if hold is not None else self.name)
        raise LockLostError(f"The lock {self.name} is not held here", name=self.name)

    @property
    def owner_id(self) -> str | None:
        """The secret of the hold, which is enough to extend or release it. None before the first. Do not log it."""
        hold = self._hold
        return hold.owner if hold is not None else None

    @property
    def fencing_token(self) -> int | None:
        """Larger than that of every earlier hold of the key; None before the first hold."""
        hold = self._hold
        return hold.fencing_token if hold is not None else None

    @property
    def fencing_tokens(self) -> dict[str, int | None]:
        """The fencing token of each canonical name; empty before the first hold. Of one key it has one."""
        return {hold.name: hold.fencing_token for hold in self._holds}

    @property
    def slot(self) -> int | None:
        """Which of the ``slots`` the hold has, from 0; None without ``slots``, and before the first hold."""
        hold = self._hold
        return hold.place if hold is not None else None

    @property
    def acquired_at(self) -> datetime | None:
        """When the hold was granted, aware, by the backend's clock; None before the first hold."""
        hold = self._hold
        return hold.acquired_at if hold is not None else None

    @property
    def expires_at(self) -> datetime | None:
        """When the lease ends unless it is renewed, aware, by the backend's clock; None for a session lock."""
        hold = self._hold
        return hold.expires_at if hold is not None else None

    def info(self) -> LockInfo | None:
        """Ask the backend for this hold, with its owner id; None if it is gone."""
        return run(self._info())

    @awaited
    async def ainfo(self) -> LockInfo | None:
        """:meth:`info` for a coroutine."""
        return await arun(self._info())

    def _info(self) -> Operations[LockInfo | None]:
        return self._info_of(self._hold)

    @staticmethod
    def _info_of(hold: Hold | None) -> Operations[LockInfo | None]:
        if hold is None or hold.ended or hold.foreign:
            return None
        limit = clock.now() + OPERATION_SECONDS
        for record in (yield Call(hold.backend.inspect_many, [hold.name], limit)):
            if record.fencing_token == hold.fencing_token:
                return hold.backend.info(record, owner_id=hold.owner)
        return None

    def guard(
        self, using: str = "default", timeout: Seconds = GUARD_SECONDS
    ) -> contextlib.AbstractContextManager[None]:
        """Protect the caller's own transaction on the database ``using`` against holders that are out of date.

        A transaction that passed the guard cannot commit after one of a newer holder has. Waits at most ``timeout``
        seconds for an older guarded transaction to end, then raises LockBackendError. LockLostError if the hold is
        lost or a newer holder was there first; the transaction is then marked for rollback. Serialization errors of
        the database pass through: retry as with any such transaction. TransactionManagementError outside of one.
        ValueError for a hold that is not exclusive: it would let one holder's transaction shut out the others.

        Example::

            with lock("billing-run") as held:
                with transaction.atomic(), held.guard():
                    save(batch)
        """
        seconds = wait_seconds(timeout)
        assert seconds is not None
        # An attached hold has brought its kind with it.
        if self._entrance.places or any(hold.places for hold in self._holds):
            raise ValueError(f"guard() needs an exclusive hold, and {self.name} is shared or has slots=")
        return self._guarded(using, seconds)

    def _guarded(self, using: str, seconds: float) -> contextlib.AbstractContextManager[None]:
        return guard(self._checked, using, seconds)

    def __repr__(self) -> str:  # without the owner id
        hold = self._hold
        state = "not held" if hold is None else "held" if hold.live else "lost" if _is_lost(hold) else "not held"
        return f"<Lock {self.key.name if hold is None else hold.name} {state}>"


def _is_lost(hold: Hold | None) -> bool:
    if hold is None or hold.foreign:
        return False
    if not hold.ended and hold.over and hold.deadline:
        renewer.expire(hold)
    return hold.state is State.LOST


spelled_out(Lock)
BaseLockBackend.make_lock = Lock
