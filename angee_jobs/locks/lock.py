"""``Lock``, and the ways to use it: policy, once for all backends.

What a lock does is written as generators of steps (see ``waiting.py``), so that a thread and a coroutine follow the
same rules and differ only in how they wait.

An exception may strike at any instruction: a signal handler's (Celery's soft time limit is one), or a cancellation.
So a hold, with its owner id, exists before the request that may win it, and whoever is struck between the request and
the moment when the hold is known hands it to the renewal thread, which releases by owner id whatever came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from datetime import datetime
from typing import Self

from . import clock, signals
from .backends.base import VERB_SECONDS, BaseLockBackend, Extension, Grant, HandleBackend, describe_holder, lost
from .conf import lock_backends
from .errors import LockBackendError, LockLostError, LockNotAcquiredError
from .guard import GUARD_SECONDS, guard
from .hold import End, Hold
from .keys import LockKey, as_lock_key
from .renewal import renewer
from .transactions import Binding, current_transactions
from .transactions import settle as settle_transactions
from .types import LockInfo, Seconds, lease_seconds, wait_seconds
from .waiting import Bell, Call, Steps, ThreadBell, room_of, run, wait_in_line

logger = logging.getLogger("angee_jobs.locks")


class Lock:
    """A lock on one key: made by :func:`lock`, taken by ``with`` or :meth:`acquire`.

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
        note: str = "",
        backend: str | BaseLockBackend = "default",
    ) -> None:
        self.key = as_lock_key(key)
        self.name: str = self.key.name
        self._timeout = wait_seconds(timeout)
        self._ttl = None if ttl is None else lease_seconds(ttl)
        self._auto_extend = auto_extend
        self._note = note
        self._backend = backend
        self._hold: Hold | None = None
        #: The blocks that are open, by the thread or task that entered them.
        self._blocks: list[tuple[int, Hold | None, Binding | None]] = []

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
        wait = self._timeout if timeout is None else wait_seconds(timeout)
        return run(self._acquire_steps(wait, False, ThreadBell)) is not None

    def release(self) -> bool:
        """Give up the hold now; False if there is none, or if it was lost.

        Frees the lock also where the end of a block would keep it until the transaction's commit.
        """
        hold = self._hold
        return hold is not None and run(_finish_steps(hold)) is End.RELEASED

    def extend(self, ttl: Seconds | None = None) -> bool:
        """Let the lease end ``ttl`` seconds from now (without one: the lock's own), or when it would have if later.

        False if the hold is gone. A session lock, which has no end to move, tells whether it still lives.
        """
        seconds = None if ttl is None else lease_seconds(ttl)
        hold = self._hold
        return hold is not None and run(self._extend_steps(hold, seconds))

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
        """The secret of the hold: whoever knows it can extend or release. None without a hold. Do not log it."""
        return self._hold.owner if self._hold is not None else None

    @property
    def fencing_token(self) -> int | None:
        """Larger than that of every earlier hold of the key; None without a hold."""
        return self._hold.fencing_token if self._hold is not None else None

    @property
    def acquired_at(self) -> datetime | None:
        """When the hold was granted, aware, by the backend's clock; None without a hold."""
        return self._hold.granted_at if self._hold is not None else None

    @property
    def expires_at(self) -> datetime | None:
        """When the lease ends unless it is renewed, aware, by the backend's clock; None for a session lock."""
        return self._hold.expires_at if self._hold is not None else None

    def info(self) -> LockInfo | None:
        """Ask the backend for this hold, with its owner id; None if it is gone."""
        hold = self._hold
        if hold is None or hold.ended:
            return None
        record = hold.backend.inspect(hold.name, clock.now() + VERB_SECONDS)
        if record is None or record.fencing_token != hold.fencing_token:
            return None
        return hold.backend.info(record, owner_id=hold.owner)

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

    def _enter(self, *, raises: bool) -> bool:
        """Enter a block; False if refused, or LockNotAcquiredError if ``raises``."""
        before = self._hold
        binding: Binding | None = None
        try:
            mine = current_transactions()
            if mine:
                binding = room_of(self._verbs()).bindings.get(self.name)
                if binding is not None and binding.take_again(mine):
                    self._hold = binding.hold
                    self._blocks.append((_caller(), binding.hold, binding))
                    return True
                binding = None
            hold = run(self._acquire_steps(self._timeout, self._auto_extend, ThreadBell, raises=raises))
            if hold is not None and mine:
                binding = Binding(hold, mine, lambda hold: run(_finish_steps(hold)) is not End.LOST)
            self._blocks.append((_caller(), hold, binding))
            return hold is not None
        except BaseException:
            # The body will not run, nor will the block be left.
            hold = self._hold
            if hold is not None and hold is not before:
                self._blocks[:] = [block for block in self._blocks if block[1] is not hold]
                if binding is not None:
                    binding.block_open = False  # the hold is the transaction's, which may have had it before
                else:
                    renewer.abandon(hold)
            raise

    def _leave(self, exc: BaseException | None) -> None:
        """Leave the block. The body's exception is never hidden; what else went wrong becomes a note of it."""
        block: tuple[int, Hold | None, Binding | None] | None = None
        try:
            block = self._block_of_caller()
            _, hold, binding = block
            if hold is None or hold.foreign:
                return  # refused, or a forked child that leaves its parent's block
            if not hold.ended and hold.over:
                renewer.lose(hold, "its lease ran out before it could be renewed")
            if hold.ended is not None:
                if binding is not None:
                    binding.drop()
            elif binding is not None:
                binding.leave_block()
            else:
                run(_finish_steps(hold))
        except LockBackendError as error:
            if exc is None:
                raise
            exc.add_note(f"The lock {self.name} could not be released: {error}")
            return
        except BaseException:
            hold = (block or self._block_of_caller())[1]
            if hold is not None:
                renewer.abandon(hold)
            raise
        finally:
            if block in self._blocks:
                self._blocks.remove(block)
        if hold.ended is End.LOST:
            if exc is None:
                raise lost(self.name)
            exc.add_note(f"The lock {self.name} had been lost before the block was left")

    def _block_of_caller(self) -> tuple[int, Hold | None, Binding | None]:
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

    # The policy, as steps.

    def _verbs(self) -> BaseLockBackend:
        backend = self._backend
        return lock_backends.verbs(backend) if isinstance(backend, str) else backend

    def _acquire_steps(
        self, wait: float | None, renews: bool, make_bell: type[ThreadBell], *, raises: bool = False
    ) -> Steps[Hold | None]:
        """The new hold, or None if refused."""
        backend = self._verbs()
        name = self.name
        room = room_of(backend)
        hold = Hold(self.key, name, backend, room, self._ttl or backend.ttl)
        holder = describe_holder(self._note)
        began = clock.now()

        def attempt(deadline: float) -> Grant | None:
            hold.started = clock.now()
            return backend.acquire(name, hold.owner, hold.ttl, holder, deadline)

        try:
            limit = began + VERB_SECONDS if not wait else began + min(wait, VERB_SECONDS)
            grant: Grant | None = None
            if isinstance(backend, HandleBackend):
                hold.started = began
                grant = yield Call(backend.acquire_within, self.key, hold.owner, wait)
                wait = None
            elif not wait or name not in room.lines:  # a newcomer who will wait does not overtake those who do
                grant = yield Call(attempt, limit)
                if grant is None and room.bindings:
                    settle_transactions()  # the holder's transaction may be over without anybody having noticed
                    grant = yield Call(attempt, limit)
            if grant is None and wait:
                bell: Bell = make_bell()
                grant = yield from wait_in_line(room, name, began + wait, bell, attempt)
            if grant is None:
                yield from self._refused_steps(backend, clock.now() - began, raises)
                return None
            hold.grant(grant, hold.started, renews=renews, at_most=None)
            renewer.add(hold)
            self._hold = hold
            signals.tell(
                signals.lock_acquired,
                type(backend),
                key=self.key,
                backend=backend.alias,
                fencing_token=hold.fencing_token,
                waited=clock.now() - began,
            )
            return hold
        except LockNotAcquiredError:
            raise
        except LockBackendError as error:
            if error.uncertain:
                renewer.ensure_running()
                renewer.abandon(hold)
            raise
        except BaseException:
            renewer.ensure_running()
            renewer.abandon(hold)
            raise

    def _refused_steps(self, backend: BaseLockBackend, waited: float, raises: bool) -> Steps[None]:
        """Make the refusal visible; the holder is looked up only if somebody is going to see it."""
        holder: LockInfo | None = None
        if raises or signals.lock_refused.receivers or logger.isEnabledFor(logging.INFO):
            holder = yield Call(_look, backend, self.name)
        who = f", held by {holder.holder}" if holder is not None and holder.holder is not None else ""
        logger.info("Refused the lock %s after %.3f s%s", self.name, waited, who)
        signals.tell(
            signals.lock_refused,
            type(backend),
            key=self.key,
            backend=backend.alias,
            waited=waited,
            holder=holder,
        )
        if raises:
            raise LockNotAcquiredError(f"The lock {self.name} is taken{who}", name=self.name, holder=holder)

    def _extend_steps(self, hold: Hold, ttl: float | None) -> Steps[bool]:
        if not self.held:
            return False
        seconds = ttl or hold.ttl
        sent = clock.now()
        limit = min(sent + VERB_SECONDS, hold.deadline)
        extended = yield Call(hold.backend.extend, [Extension(hold.name, hold.owner, seconds)], limit)
        if hold.owner not in extended:
            renewer.lose(hold, "the backend does not know it any more")
            return False
        if hold.ended:
            if hold.ended is End.LOST:  # told meanwhile: it may not come back
                renewer.abandon(hold)
            return False
        hold.extended(sent, seconds)
        return True


def _finish_steps(hold: Hold) -> Steps[End | None]:
    """Give up ``hold``: RELEASED, LOST if it was gone already, or None if somebody else has ended it."""
    if hold.foreign:
        return None
    try:
        if hold.ended is None and hold.over:
            renewer.lose(hold, "its lease ran out before it could be renewed")
            return End.LOST
        if not hold.end(End.RELEASED):
            return End.LOST if hold.ended is End.LOST else None
        renewer.forget(hold)
        sent = clock.now()
        limit = min(sent + VERB_SECONDS, max(hold.deadline, sent + 0.25))
        released = yield Call(hold.backend.release, hold.name, hold.owner, limit)
        if not released:
            hold.found_lost()
            renewer.tell_loss(hold, "the backend did not know it any more when it was released")
            return End.LOST
    except LockBackendError as error:
        renewer.abandon(hold)
        if hold.over:
            hold.found_lost()
            renewer.tell_loss(hold, f"its lease ran out while it could not be released: {error}")
            return End.LOST
        raise
    except BaseException:
        renewer.abandon(hold)
        raise
    hold.room.changed(hold.name)
    signals.tell(
        signals.lock_released,
        type(hold.backend),
        key=hold.key,
        backend=hold.backend.alias,
        fencing_token=hold.fencing_token,
        held_for=clock.now() - hold.started,
    )
    return End.RELEASED


def _look(backend: BaseLockBackend, name: str) -> LockInfo | None:
    """Who holds ``name``, for a message: None also if that cannot be told."""
    try:
        record = backend.inspect(name, clock.now() + 1.0)
    except Exception:
        return None
    return None if record is None else backend.info(record)


def _caller() -> int:
    """What a block belongs to: the running task, or else the thread."""
    if asyncio._get_running_loop() is None:  # current_task() would raise, which costs more than the rest of a block
        return threading.get_ident()
    return id(asyncio.current_task())
