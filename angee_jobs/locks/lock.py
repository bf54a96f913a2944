"""``Lock``: one lock on one key, for threads and for coroutines.

What it does is in ``policy.py``; here is how its users see it, and how blocks are entered and left.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import datetime
from typing import Any, Self

from . import clock
from .backends.base import VERB_SECONDS, BaseLockBackend
from .conf import lock_backends
from .errors import LockBackendError, LockLostError
from .guard import GUARD_SECONDS, guard
from .hold import End, Hold
from .keys import LockKey, as_lock_key
from .policy import acquire_steps, adopt_steps, detach_steps, extend_steps, finish_steps, lost
from .renewal import renewer
from .steps import Call, Steps, TaskBell, ThreadBell, arun, run
from .transactions import Binding, Transaction, current_transactions, transactions_of_task
from .types import LockInfo, Seconds, lease_seconds, wait_seconds
from .waiting import room_of

#: An open block: the thread or task that entered it, its hold unless it was refused, and what binds that.
_Block = tuple[int, Hold | None, Binding | None]


class Lock:
    """A lock on one key: made by :func:`lock`, taken by ``with``, ``async with``, or :meth:`acquire`.

    It has one hold at a time and can be used again after a release or a loss. It may be handed between threads. All
    requests raise :class:`LockBackendError` if the backend cannot be reached or gives no answer in time.
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
        #: A hold that was attached and waits for the block that it is meant for.
        self._attached = False
        #: The blocks that are open, by the thread or task that entered them.
        self._blocks: list[_Block] = []

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
            renewer.lose(hold, "its lease ran out before it could be renewed")
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
                raise lost(self.name)
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
        return self._hold.granted_at if self._hold is not None else None

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

    # Blocks.

    def __enter__(self) -> Self:
        self._enter(raises=True)
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self._leave(exc)

    async def __aenter__(self) -> Self:
        await self._aenter(raises=True)
        return self

    async def __aexit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        await self._aleave(exc)

    def _enter(self, *, raises: bool) -> bool:
        """Enter a block; False if refused, or LockNotAcquiredError if ``raises``."""
        if self._cancel_on_loss:
            raise ValueError("cancel_on_loss cancels a task: it needs async with")
        before = self._hold, [*self._blocks]
        try:
            return run(self._enter_steps(current_transactions(), ThreadBell, raises))
        except BaseException:
            self._undo(*before)
            raise

    async def _aenter(self, *, raises: bool) -> bool:
        before = self._hold, [*self._blocks]
        try:
            entered = await arun(self._enter_steps(await transactions_of_task(), TaskBell, raises))
            if entered and self._cancel_on_loss:
                hold = self._block_of_caller()[1]
                assert hold is not None
                hold.on_lost = cancel = _Canceller()
                if hold.ended is End.LOST:
                    cancel()
            return entered
        except BaseException:
            self._undo(*before)
            raise

    def _leave(self, exc: BaseException | None) -> None:
        """Leave the block. The body's exception is never hidden; what else went wrong becomes a note of it."""
        try:
            hold = run(self._leave_steps(exc))
        except LockBackendError:
            raise
        except BaseException:
            self._abandon_block()
            raise
        self._tell_body(hold, exc)

    async def _aleave(self, exc: BaseException | None) -> None:
        if isinstance(exc, GeneratorExit):  # the coroutine is being thrown away, and may not wait
            self._abandon_block()
            return
        try:
            hold = await arun(self._leave_steps(exc))
        except LockBackendError:
            raise
        except BaseException:
            self._abandon_block()
            raise
        if hold is not None and isinstance(hold.on_lost, _Canceller) and hold.on_lost.disarm(exc):
            raise lost(self.name) from exc
        self._tell_body(hold, exc)

    def _tell_body(self, hold: Hold | None, exc: BaseException | None) -> None:
        if hold is not None and hold.ended is End.LOST:
            if exc is None:
                raise lost(self.name)
            exc.add_note(f"The lock {self.name} had been lost before the block was left")

    def _undo(self, hold_before: Hold | None, blocks_before: list[_Block]) -> None:
        """Struck while entering: the body will not run, nor will the block be left."""
        entered = [block for block in self._blocks if block not in blocks_before and block[0] == _caller()]
        for block in entered:
            self._blocks.remove(block)
        hold = entered[0][1] if entered else self._hold
        if hold is None or (hold is hold_before and not entered):
            return
        binding = hold.room.bindings.get(hold.name)
        if binding is not None and binding.hold is hold:
            binding.block_open = False  # the hold is the transaction's, which may have had it before
        else:
            renewer.abandon(hold)

    def _abandon_block(self) -> None:
        """Struck while leaving: whatever is left of the hold, the renewal thread gives it up."""
        block = self._block_of_caller()
        if block in self._blocks:
            self._blocks.remove(block)
        _, hold, binding = block
        if hold is None:
            hold = self._hold
        if hold is not None and not hold.foreign and (binding is None or not binding.pending):
            renewer.abandon(hold)
        elif binding is not None:
            binding.block_open = False

    def _block_of_caller(self) -> _Block:
        """The innermost open block of the calling thread or task, or just the innermost: generators wander."""
        caller = _caller()
        for block in reversed(self._blocks):
            if block[0] == caller:
                return block
        return self._blocks[-1] if self._blocks else (caller, None, None)

    def __del__(self) -> None:
        hold = getattr(self, "_hold", None)
        if hold is not None and hold.ended is None and not hold.foreign:
            for _, _, binding in self._blocks:
                if binding is not None:
                    binding.block_open = False
            if hold.room.bindings.get(hold.name) is None:
                # Finalizers run anywhere: leave a note, wait for nothing.
                renewer.abandon(hold)

    # As steps.

    def _verbs(self) -> BaseLockBackend:
        backend = self._backend
        return lock_backends.verbs(backend) if isinstance(backend, str) else backend

    def _wait(self, timeout: Seconds | None) -> float | None:
        return self._timeout if timeout is None else wait_seconds(timeout)

    def _take(self, hold: Hold) -> None:
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

    def _enter_steps(self, mine: list[Transaction], make_bell: Any, raises: bool) -> Steps[bool]:
        binding: Binding | None = None
        hold: Hold | None
        if self._attached and self.held:
            self._attached = False
            hold = self._hold
            assert hold is not None
            if self._auto_extend:
                renewer.start_renewing(hold)
        else:
            if mine:
                binding = room_of(self._verbs()).bindings.get(self.name)
                if binding is not None and binding.take_again(mine):
                    self._hold = binding.hold
                    self._blocks.append((_caller(), binding.hold, binding))
                    return True
                binding = None
            hold = yield from self._acquire_steps(self._timeout, make_bell, renews=self._auto_extend, raises=raises)
        if hold is not None and mine:
            binding = Binding(hold, mine, lambda hold: run(finish_steps(hold)) is not End.LOST)
        self._blocks.append((_caller(), hold, binding))
        return hold is not None

    def _leave_steps(self, exc: BaseException | None) -> Steps[Hold | None]:
        """Leave the caller's block; its hold, or None if there is nothing to tell of one."""
        block = self._block_of_caller()
        _, hold, binding = block
        try:
            if hold is None or hold.foreign:
                return None  # refused, or a forked child that leaves its parent's block
            if not hold.ended and hold.over:
                renewer.lose(hold, "its lease ran out before it could be renewed")
            if binding is not None and hold.ended is None and binding.leave_block():
                return hold  # the hold belongs to the transaction now
            if binding is not None:
                binding.drop()
            if hold.ended is None:
                yield from finish_steps(hold)
            return hold
        except LockBackendError as error:
            if exc is None:
                raise
            exc.add_note(f"The lock {self.name} could not be released: {error}")
            return None
        finally:
            if block in self._blocks:
                self._blocks.remove(block)

    def _info_steps(self) -> Steps[LockInfo | None]:
        hold = self._hold
        if hold is None or hold.ended:
            return None
        record = yield Call(hold.backend.inspect, hold.name, clock.now() + VERB_SECONDS)
        if record is None or record.fencing_token != hold.fencing_token:
            return None
        return hold.backend.info(record, owner_id=hold.owner)


class _Canceller:
    """Cancels the task that made it when the lock is lost, and tells that cancellation from any other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._armed = True
        self._cancelled = False

    def __call__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._armed and self._task is not None:
            self._cancelled = self._task.cancel("The lock was lost")

    def disarm(self, exc: BaseException | None) -> bool:
        """The block is left: take our cancellation back; True if ``exc`` is that one, and nobody else's."""
        self._armed = False
        if not self._cancelled or self._task is None:
            return False
        return self._task.uncancel() == 0 and isinstance(exc, asyncio.CancelledError)


def attach_lock(
    key: LockKey | str,
    owner_id: str,
    *,
    ttl: Seconds | None = None,
    auto_extend: bool = True,
    note: str = "",
    backend: str = "default",
) -> Lock:
    """Adopt a hold that was detached, here or in another process; a :class:`Lock` that holds it.

    The owner id changes in the same step, so this works once: a second delivery of the same message gets
    LockLostError, and so does one that comes after the time given to ``detach``. From now on the lease is ``ttl``
    seconds (without one: the backend's). A ``with`` block over the result renews it and releases it at its end.

    Example::

        @task
        def make_report(report_id, owner_id):
            with attach_lock(f"export-{report_id}", owner_id, backend="leases"):
                ...
    """
    attached = Lock(key, ttl=ttl, auto_extend=auto_extend, note=note, backend=backend)
    if not isinstance(owner_id, str) or not owner_id:
        raise TypeError("owner_id must be the text that detach() returned")
    steps = adopt_steps(attached._verbs(), attached.key, attached.name, owner_id, ttl=attached._ttl, note=note)
    attached._hold = run(steps)
    attached._attached = True
    return attached


def _caller() -> int:
    """What a block belongs to: the running task, or else the thread."""
    if asyncio._get_running_loop() is None:  # current_task() would raise, which costs more than the rest of a block
        return threading.get_ident()
    return id(asyncio.current_task())
