"""``Lock``: one lock on one key, for threads and for coroutines.

Here is what its users see. What it does is in ``policy.py``, and how blocks are entered and left in ``entering.py``.
"""

from __future__ import annotations

import contextlib
import functools
from datetime import datetime
from typing import Any

from . import clock
from .acquiring import acquire_steps, detach_steps, extend_steps, finish_steps, lost_error
from .backends.base import VERB_SECONDS, BaseLockBackend
from .block import Enterable
from .concurrency import Call, Steps, TaskBell, ThreadBell, arun, run
from .conf import lock_backends
from .errors import LockLostError
from .guard import GUARD_SECONDS, guard
from .hold import End, Hold
from .keys import LockKey, as_lock_key
from .renewal import renewer
from .transactions import handle_dropped
from .types import LockInfo, Seconds, lease_seconds, wait_seconds


class Lock(Enterable):
    """A lock on one key: made by :func:`lock`, taken by ``with``, ``async with``, or :meth:`acquire`.

    It has one hold at a time and can be used again after a release or a loss. It may be handed between threads. ``key``
    is its :class:`LockKey`, ``name`` the canonical name of that. All requests raise :class:`LockBackendError` if the
    backend cannot be reached or gives no answer in time.
    """

    def __init__(
        self,
        key: LockKey | str,
        *,
        timeout: Seconds | None = None,
        ttl: Seconds | None = None,
        auto_extend: bool = True,
        hold_at_least: Seconds | None = None,
        hold_at_most: Seconds | None = None,
        cancel_on_loss: bool = False,
        note: str = "",
        backend: str | BaseLockBackend = "default",
    ) -> None:
        self.key = as_lock_key(key)
        self.name: str = self.key.name
        self._timeout = wait_seconds(timeout)
        self._ttl = None if ttl is None else lease_seconds(ttl)
        self._auto_extend = auto_extend
        self._at_least = None if hold_at_least is None else lease_seconds(hold_at_least, "hold_at_least")
        self._at_most = None if hold_at_most is None else lease_seconds(hold_at_most, "hold_at_most")
        if self._at_least is not None and self._at_most is not None and self._at_least > self._at_most:
            raise ValueError(f"hold_at_least ({hold_at_least!r}) is longer than hold_at_most ({hold_at_most!r})")
        self._cancel_on_loss = cancel_on_loss
        self._note = note
        self._backend = backend
        self._hold: Hold | None = None
        super().__init__()

    def __reduce_ex__(self, protocol: object) -> Any:
        # Two objects would have one hold.
        raise TypeError("A Lock cannot be copied or pickled. To hand its hold to another process, use detach().")

    # Taking and giving up.

    def acquire(self, timeout: Seconds | None = None) -> bool:
        """Take the lock; False if somebody else holds it. Starts no renewal, but tells a loss.

        ``timeout`` is the total wait in seconds, or a timedelta; without one, the lock's own, and without that one
        the lock is tried once, now. Also False if this very lock already holds the key: locks are not re-entrant.

        Example::

            billing = lock("billing-run", ttl=60)
            if billing.acquire():
                try:
                    ...
                    billing.extend()
                finally:
                    billing.release()
        """
        before = self._hold, [*self._blocks]
        try:
            return run(self._acquire_steps(self._wait(timeout), ThreadBell)) is not None
        except BaseException:
            self._undo(*before)
            raise

    async def aacquire(self, timeout: Seconds | None = None) -> bool:  # noqa: ASYNC109  the total wait, as in acquire
        """:meth:`acquire` for a coroutine: waiting takes no thread, and a cancellation leaves nothing behind."""
        before = self._hold, [*self._blocks]
        try:
            return await arun(self._acquire_steps(self._wait(timeout), TaskBell)) is not None
        except BaseException:
            self._undo(*before)
            raise

    def release(self) -> bool:
        """Give up the hold now; False if there is none, or if it was lost.

        Frees the lock also where the end of a block would keep it until the transaction's commit.
        """
        hold = self._hold
        return hold is not None and run(finish_steps(hold)) is End.RELEASED

    async def arelease(self) -> bool:
        """:meth:`release` for a coroutine."""
        hold = self._hold
        return hold is not None and await arun(finish_steps(hold)) is End.RELEASED

    def extend(self, ttl: Seconds | None = None) -> bool:
        """Let the lease end ``ttl`` seconds from now (without one: the lock's own), or when it would have if later.

        False if the hold is gone. A session lock, which has no end to move, tells whether it still lives.
        """
        seconds = None if ttl is None else lease_seconds(ttl)
        hold = self._hold
        return hold is not None and self.held and run(extend_steps(hold, seconds))

    async def aextend(self, ttl: Seconds | None = None) -> bool:
        """:meth:`extend` for a coroutine."""
        seconds = None if ttl is None else lease_seconds(ttl)
        hold = self._hold
        return hold is not None and self.held and await arun(extend_steps(hold, seconds))

    def detach(self, ttl: Seconds | None = None) -> str:
        """Let go of the hold without freeing the lock; the owner id with which another process can attach it, once.

        Unless that is done within ``ttl`` seconds (without one: the lock's own), the lock comes free: choose it longer
        than the queue's delay. LockLostError if there is no hold; ImproperlyConfigured for a session lock, which
        cannot leave its process. Whoever knows the owner id can release the lock: send it to the task, do not log it.

        Example::

            export = lock(f"export-{report.pk}", backend="leases")
            if export.acquire():
                make_report.enqueue(report.pk, export.detach(ttl=3600))
        """
        seconds = None if ttl is None else lease_seconds(ttl)
        self.check()
        assert self._hold is not None
        return run(detach_steps(self._hold, seconds, self._note))

    # What is known of the hold.

    @property
    def held(self) -> bool:
        """Whether this process holds the lock by this object, as far as it can know without asking."""
        hold = self._hold
        return hold is not None and not hold.ended and not hold.foreign and not hold.over

    @property
    def lost(self) -> bool:
        """Whether the hold ended without being released. False before the first hold, and after a release."""
        hold = self._hold
        if hold is None or hold.foreign:
            return False
        if not hold.ended and hold.over:
            renewer.expire(hold)
        return hold.ended is End.LOST

    def check(self) -> None:
        """LockLostError unless the lock is held. Costs no request; call it between the steps of long work.

        Example::

            with lock("billing-run", ttl=30) as held:
                for batch in batches:
                    held.check()
                    send(batch)
        """
        if not self.held:
            if self.lost:
                raise lost_error(self.name)
            raise LockLostError(f"The lock {self.name} is not held here", name=self.name)

    @property
    def owner_id(self) -> str | None:
        """The secret of the hold: whoever knows it can extend or release. None before the first. Do not log it."""
        return self._hold.owner if self._hold is not None else None

    @property
    def fencing_token(self) -> int | None:
        """Larger than that of every earlier hold of the key; None before the first hold."""
        return self._hold.fencing_token if self._hold is not None else None

    @property
    def acquired_at(self) -> datetime | None:
        """When the hold was granted, aware, by the backend's clock; None before the first hold."""
        return self._hold.acquired_at if self._hold is not None else None

    @property
    def expires_at(self) -> datetime | None:
        """When the lease ends unless it is renewed, aware, by the backend's clock; None for a session lock."""
        return self._hold.expires_at if self._hold is not None else None

    def info(self) -> LockInfo | None:
        """Ask the backend for this hold, with its owner id; None if it is gone."""
        return run(self._info_steps())

    async def ainfo(self) -> LockInfo | None:
        """:meth:`info` for a coroutine."""
        return await arun(self._info_steps())

    def guard(
        self, using: str = "default", timeout: Seconds = GUARD_SECONDS
    ) -> contextlib.AbstractContextManager[None]:
        """Protect the caller's own transaction on the database ``using`` against holders that are out of date.

        A transaction that passed the guard cannot commit after one of a newer holder has. Waits at most ``timeout``
        seconds for an older guarded transaction to end, then raises LockBackendError. LockLostError if the hold is
        lost or a newer holder was there first; the transaction is then marked for rollback. Serialization errors of
        the database pass through: retry as with any such transaction. TransactionManagementError outside of one.

        Example::

            with lock("billing-run") as held:
                with transaction.atomic(), held.guard():
                    save(batch)
        """
        seconds = wait_seconds(timeout)
        assert seconds is not None
        return guard(self, using, seconds)

    def __repr__(self) -> str:  # without the owner id
        state = "held" if self.held else "lost" if self.lost else "not held"
        return f"<Lock {self.name} {state}>"

    # As steps.

    def _verbs(self) -> BaseLockBackend:
        backend = self._backend
        return backend if isinstance(backend, BaseLockBackend) else lock_backends.verbs(backend)

    def _wait(self, timeout: Seconds | None) -> float | None:
        return self._timeout if timeout is None else wait_seconds(timeout)

    def _take(self, hold: Hold) -> None:
        hold.handle = renewer.when_dropped(self, functools.partial(handle_dropped, hold))
        self._hold = hold

    def _acquire_steps(
        self, wait: float | None, make_bell: Any, *, renews: bool = False, raises: bool = False
    ) -> Steps[Hold | None]:
        return acquire_steps(
            self._verbs(),
            self.key,
            self.name,
            wait=wait,
            ttl=self._ttl,
            note=self._note,
            renews=renews,
            at_least=self._at_least,
            at_most=self._at_most,
            make_bell=make_bell,
            raises=raises,
            take=self._take,
        )

    def _info_steps(self) -> Steps[LockInfo | None]:
        hold = self._hold
        if hold is None or hold.ended or hold.foreign:
            return None
        record = yield Call(hold.backend.inspect, hold.name, clock.now() + VERB_SECONDS)
        if record is None or record.fencing_token != hold.fencing_token:
            return None
        return hold.backend.info(record, owner_id=hold.owner)
