"""How a block over a lock is entered and left: ``with`` and ``async with``.

An exception may strike between any two instructions here too, and nobody but the block's own entry and exit knows of a
hold then. Whoever is struck on the way in undoes the entry; whoever is struck on the way out leaves the hold to the
renewal thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, Self

from .acquiring import finish_steps, lost_error
from .backends.base import BaseLockBackend
from .concurrency import Steps, TaskBell, ThreadBell, arun, run
from .errors import LockBackendError
from .hold import End, Hold
from .renewal import Dropped, renewer
from .transactions import Binding, Transaction, current_transactions, handle_dropped, transactions_of_task
from .waiting import room_of


class Block:
    """A block: its lock, the thread or task that entered it, its hold unless it was refused, and what binds that."""

    __slots__ = ("binding", "caller", "hold", "lock", "statement")

    def __init__(self, lock: Enterable | None = None) -> None:
        #: Only for a with statement, and only until that is over: else a lock would not go when it is dropped.
        self.lock = lock
        self.caller = 0
        self.hold: Hold | None = None
        self.binding: Binding | None = None
        #: Tells when the with statement is gone without having left the block.
        self.statement: Dropped | None = None

    def leave(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        """What ``__exit__`` does. The body's exception is never hidden; what else went wrong becomes a note of it."""
        lock, block = self.lock, self
        assert lock is not None
        try:
            if not self.caller:  # somebody calls __exit__ by hand
                lock._opening.pop(threading.get_ident(), None)
                self.statement = None
                block = lock._block_of_caller()
            hold = run(lock._leave_steps(block, exc))
        except LockBackendError:
            raise
        except BaseException:
            lock._abandon_block(block)
            raise
        lock._tell_body(hold, exc)

    def dropped(self) -> None:
        """Its with statement is gone."""
        lock, self.statement, self.lock = self.lock, None, None
        if lock is not None and self in lock._blocks:
            lock._abandon_block(self)


class ExitOnStack:
    """``__exit__`` as a descriptor, so that there is one object for each with statement, which only that has.

    An exception that strikes at the very first instruction of ``__exit__`` leaves the statement without any code of
    ours having run. (In a test with a short body one in a hundred did.) A lock that is not dropped then, since it is a
    module's, say, would be renewed for ever. But the object that the interpreter was about to call is dropped.
    """

    def __get__(self, manager: Any, manager_class: Any) -> Any:
        if manager is None:
            return manager_class._leave_block  # contextlib.ExitStack asks the class
        lock: Enterable = getattr(manager, "_lock", manager)
        block = Block(lock)
        # Not a bound method, which the interpreter takes apart, and drops, before it makes the call.
        leave = functools.partial(Block.leave, block)
        block.statement = renewer.when_dropped(leave, block.dropped)  # a cycle, until the block is left or dropped
        lock._opening[threading.get_ident()] = block
        return leave


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
        self._blocks: list[Block] = []
        #: The block that a thread is just entering, made with its with statement's ``__exit__``.
        self._opening: dict[int, Block] = {}

    def _verbs(self) -> BaseLockBackend:
        raise NotImplementedError

    def _take(self, hold: Hold) -> None:
        raise NotImplementedError

    def _acquire_steps(
        self, wait: float | None, make_bell: Any, *, renews: bool = False, raises: bool = False
    ) -> Steps[Hold | None]:
        raise NotImplementedError

    # Here the try statements stand in the methods that the interpreter itself calls: between the return of a call and
    # the caller's own try there is an instruction at which a signal can strike.

    def __enter__(self) -> Self:
        before = self._before()
        try:
            run(self._enter_steps(current_transactions(), ThreadBell, True))
        except BaseException:
            self._undo(*before)
            raise
        return self

    def _leave_block(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        Block(self).leave(exc_type, exc, traceback)

    if TYPE_CHECKING:

        def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None: ...

    else:
        __exit__ = ExitOnStack()

    async def __aenter__(self) -> Self:
        await self._aenter(raises=True)
        return self

    async def __aexit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        await self._aleave(exc)

    def _before(self) -> tuple[Hold | None, list[Block]]:
        if self._cancel_on_loss:
            raise ValueError("cancel_on_loss cancels a task: it needs async with")
        return self._hold, [*self._blocks]

    async def _aenter(self, *, raises: bool) -> bool:
        before = self._hold, [*self._blocks]
        try:
            entered = await arun(self._enter_steps(await transactions_of_task(), TaskBell, raises))
            if entered and self._cancel_on_loss:
                hold = self._block_of_caller().hold
                assert hold is not None
                hold.on_lost = cancel = _Canceller()
                if hold.ended is End.LOST:
                    cancel()
            return entered
        except BaseException:
            self._undo(*before)
            raise

    async def _aleave(self, exc: BaseException | None) -> None:
        block = self._block_of_caller()
        if isinstance(exc, GeneratorExit):  # the coroutine is being thrown away, and may not wait
            self._abandon_block(block)
            return
        try:
            hold = await arun(self._leave_steps(block, exc))
        except LockBackendError:
            raise
        except BaseException:
            self._abandon_block(block)
            raise
        if hold is not None and isinstance(hold.on_lost, _Canceller) and hold.on_lost.disarm(exc):
            raise lost_error(self.name) from exc
        self._tell_body(hold, exc)

    def _tell_body(self, hold: Hold | None, exc: BaseException | None) -> None:
        """Tell a loss, if it was one."""
        if hold is not None and hold.ended is End.LOST:
            if exc is None:
                raise lost_error(self.name)
            exc.add_note(f"The lock {self.name} had been lost before the block was left")

    def _undo(self, hold_before: Hold | None, blocks_before: list[Block]) -> None:
        """Struck while entering: the body will not run, nor will the block be left."""
        entered = [block for block in self._blocks if block not in blocks_before and block.caller == _caller()]
        for block in entered:
            self._abandon_block(block)
        if not entered and self._hold is not None and self._hold is not hold_before:
            handle_dropped(self._hold)

    def _abandon_block(self, block: Block) -> None:
        """Struck while leaving: whatever is left of the hold, the renewal thread or the transaction gives it up."""
        block.statement = None
        if block in self._blocks:
            self._blocks.remove(block)
        if block.hold is not None and not block.hold.foreign:
            handle_dropped(block.hold)

    def _block_of_caller(self) -> Block:
        """The innermost open block of the calling thread or task, or just the innermost: generators wander."""
        caller = _caller()
        for block in reversed(self._blocks):
            if block.caller == caller:
                return block
        return self._blocks[-1] if self._blocks else Block()

    # As steps.

    def _open_block(self, hold: Hold | None, binding: Binding | None) -> None:
        block = self._opening.pop(threading.get_ident(), None) if self._opening else None
        if block is None or block.statement is None or block.statement() is None:  # somebody just looked at __exit__
            block = Block()
        block.caller = _caller()
        block.hold = hold
        block.binding = binding
        self._blocks.append(block)

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
                    self._take(binding.hold)
                    self._open_block(binding.hold, binding)
                    return True
                binding = None
            hold = yield from self._acquire_steps(self._timeout, make_bell, renews=self._auto_extend, raises=raises)
        if hold is not None and mine:
            binding = Binding(hold, mine, lambda hold: run(finish_steps(hold)) is not End.LOST)
        self._open_block(hold, binding)
        return hold is not None

    def _leave_steps(self, block: Block, exc: BaseException | None) -> Steps[Hold | None]:
        """Leave ``block``; its hold, or None if there is nothing to tell of one."""
        hold, binding = block.hold, block.binding
        try:
            if hold is None or hold.foreign:
                return None  # refused, or a forked child that leaves its parent's block
            if binding is not None:
                if not hold.ended and hold.over:
                    renewer.expire(hold)
                if hold.ended is None and binding.leave_block():
                    return hold  # the hold belongs to the transaction now
                binding.drop()
            yield from finish_steps(hold)
            return hold
        except LockBackendError as error:
            if exc is None:
                raise
            exc.add_note(f"The lock {self.name} could not be released: {error}")
            return None
        finally:
            block.statement = None
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
