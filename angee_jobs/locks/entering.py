"""How a block over a lock is entered and left: ``with`` and ``async with``.

An exception may strike between any two instructions here too, and nobody but the block's own entry and exit knows of a
hold then. Whoever is struck on the way in undoes the entry; whoever is struck on the way out leaves the hold to the
renewal thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, Self

from .backends.base import BaseLockBackend
from .errors import LockBackendError
from .hold import End, Hold
from .policy import finish_steps, lost
from .renewal import renewer
from .steps import Steps, TaskBell, ThreadBell, arun, run
from .transactions import Binding, Transaction, current_transactions, transactions_of_task
from .waiting import room_of

#: An open block: the thread or task that entered it, its hold unless it was refused, and what binds that.
_Block = tuple[int, Hold | None, Binding | None]


class Enterable:
    """The part of a :class:`Lock` that makes it a context manager."""

    name: str
    _timeout: float | None
    _auto_extend: bool
    _cancel_on_loss: bool
    _hold: Hold | None

    def __init__(self) -> None:
        #: A hold that was attached and waits for the block that it is meant for.
        self._attached = False
        #: The blocks that are open, by the thread or task that entered them.
        self._blocks: list[_Block] = []

    def _verbs(self) -> BaseLockBackend:
        raise NotImplementedError

    def _acquire_steps(
        self, wait: float | None, make_bell: Any, *, renews: bool = False, raises: bool = False
    ) -> Steps[Hold | None]:
        raise NotImplementedError

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

    def _enter_steps(self, mine: list[Transaction], make_bell: Any, raises: bool) -> Steps[bool]:
        binding: Binding | None = None
        hold: Hold | None
        if self._attached and (attached := self._hold) is not None and not attached.ended and not attached.over:
            self._attached = False
            hold = attached
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


def _caller() -> int:
    """What a block belongs to: the running task, or else the thread."""
    if asyncio._get_running_loop() is None:  # current_task() would raise, which costs more than the rest of a block
        return threading.get_ident()
    return id(asyncio.current_task())
