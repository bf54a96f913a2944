"""Locks and the caller's transactions: a hold that lasts until the commit.

A lock that is freed at the end of its block, but before the commit, lets the next holder read what was there before.
So a block that is entered inside ``atomic()`` binds its hold to the transaction. The release is registered with
``on_commit`` at the block's entry: callbacks run in order, and a task that the body enqueues there must find the lock
free. Nothing runs on a rollback; Django drops the callback then, and its finalizer tells us. If somebody still keeps
it alive (a traceback does), :func:`settle` sees that it has left the connection's list.

Under ``TestCase`` the test's own transaction is never committed, and ``on_commit`` callbacks are counted by the
test's author. There, nothing is registered, and the outermost atomic that is not the test's is looked at instead.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from asgiref.sync import AsyncToSync, sync_to_async
from django.db import connections

from .errors import LockBackendError
from .renewal import Dropped, renewer

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from .hold import Hold

logger = logging.getLogger("angee_jobs.locks")


class Transaction:
    """One transaction of the calling thread that a block was entered in."""

    __slots__ = ("_hook", "connection", "in_test_case", "outermost")

    def __init__(self, connection: BaseDatabaseWrapper, outermost: Any, in_test_case: bool) -> None:
        self.connection = connection
        self.outermost = outermost
        self.in_test_case = in_test_case
        self._hook: Dropped | None = None

    def watch(self, binding: Binding) -> None:
        if not self.in_test_case:
            hook = _Hook(self, binding)
            self._hook = renewer.when_dropped(hook, binding.settle)  # what a rollback does
            self.connection.on_commit(hook, robust=True)

    def committed(self) -> None:
        self._hook = None

    def same_as(self, other: Transaction) -> bool:
        return self.connection is other.connection and self.outermost is other.outermost

    @property
    def over(self) -> bool:
        """Whether it was committed or rolled back, or at least the savepoint that the block was entered in was.

        May be asked from any thread.
        """
        if self.in_test_case:
            return self.outermost not in list(self.connection.atomic_blocks)
        hook = self._hook() if self._hook is not None else None
        return hook is None or not any(entry[1] is hook for entry in list(self.connection.run_on_commit))


class _Hook:
    """What is registered with ``on_commit``."""

    __slots__ = ("__weakref__", "_binding", "_transaction")

    def __init__(self, transaction: Transaction, binding: Binding) -> None:
        self._transaction = transaction
        self._binding = binding

    def __call__(self) -> None:
        self._transaction.committed()
        self._binding.settle()


class Binding:
    """A hold that ends with its block and with every transaction that the block was entered in, the last of them."""

    def __init__(self, hold: Hold, transactions: list[Transaction], finish: Callable[[Hold], bool]) -> None:
        self.hold = hold
        self.block_open = True
        # Re-entrant, since a signal handler that uses locks may interrupt this very thread in here.
        self._settling = threading.RLock()
        self._finish = finish
        self._transactions = transactions
        _bindings[self] = None
        hold.room.bindings[hold.name] = self
        for each in transactions:
            each.watch(self)

    @property
    def pending(self) -> list[Transaction]:
        return [each for each in self._transactions if not each.over]

    def leave_block(self) -> bool:
        """The block is over; True if the hold now belongs to a transaction, which will end it."""
        if not self.pending:
            return False
        self.block_open = False
        return True

    def take_again(self, transactions: list[Transaction]) -> bool:
        """Let another block of the very transaction that has the hold have it; False if it may not."""
        pending = self.pending
        if self.block_open or self.hold.ended or self.hold.over or not pending:
            return False
        if not all(any(each.same_as(mine) for mine in transactions) for each in pending):
            return False
        new = [mine for mine in transactions if not any(each.same_as(mine) for each in pending)]
        self._transactions = pending + new
        for each in new:
            each.watch(self)
        self.block_open = True
        return True

    def settle(self) -> None:
        """Free the hold if nothing that it was kept for is left; when this returns, that is done."""
        with self._settling:  # whoever comes second waits for the release that the first has under way
            if self.block_open or self.pending:
                return
            try:
                self._finish(self.hold)
            except LockBackendError as error:
                # Raised to nobody: the transaction is over. The renewal thread goes on trying.
                logger.error("The lock %s could not be released after its transaction: %s", self.hold.name, error)
            finally:
                self.drop()

    def drop(self) -> None:
        _bindings.pop(self, None)
        if self.hold.room.bindings.get(self.hold.name) is self:
            self.hold.room.bindings.pop(self.hold.name, None)


def handle_dropped(hold: Hold) -> None:
    """Nobody is left who could release ``hold``, so it comes free soon.

    If it is bound to a transaction, that is soon enough.
    """
    binding = hold.room.bindings.get(hold.name)
    if binding is not None and binding.hold is hold:
        binding.block_open = False
        renewer.post(binding.settle)
    else:
        renewer.abandon(hold)


#: Every binding of this process; empty almost always.
_bindings: dict[Binding, None] = {}


def settle() -> bool:
    """Free what outlived its transaction; whether there is anything left to look at again."""
    for binding in list(_bindings):
        if binding.hold.foreign:
            binding.drop()
        else:
            binding.settle()
    return bool(_bindings)


renewer.chores.append(settle)


def current_transactions() -> list[Transaction]:
    """The real transactions of the calling thread, on all aliases; the test's own does not count."""
    found = []
    for connection in _open_here():
        if connection.in_atomic_block:
            blocks: list[Any] = list(connection.atomic_blocks)
            real = next((block for block in blocks if not block._from_testcase), None)
            if real is not None:
                found.append(Transaction(connection, real, in_test_case=blocks[0]._from_testcase))
            elif not blocks:  # entered by hand, without Atomic
                found.append(Transaction(connection, None, in_test_case=False))
        elif connection.connection is not None and not connection.autocommit:
            logger.warning(
                "A lock block was entered with autocommit off on %r: the lock is freed at the block's end, "
                "before your commit. Use transaction.atomic() to keep it until then.",
                connection.alias,
            )
    return found


def _open_here() -> Iterable[BaseDatabaseWrapper]:
    """``connections.all(initialized_only=True)``, which every block asks for.

    That looks for a running loop at each alias, several times, and so takes as long as the rest of a block's entry.
    Where there is none, the connections are in a plain ``threading.local``.
    """
    storage = getattr(getattr(connections, "_connections", None), "_storage", None)
    if asyncio._get_running_loop() is None and type(storage) is threading.local:
        # A list first, since a signal handler may open one meanwhile. "cvar" is what asgiref keeps for loops.
        return [each for alias, each in list(vars(storage).items()) if alias != "cvar"]
    return connections.all(initialized_only=True)


async def transactions_of_task() -> list[Transaction]:
    """The same for a coroutine.

    Under ``async_to_sync`` the coroutine itself sees no transaction: the thread that waits for it has it, and is asked.
    """
    loop = asyncio.get_running_loop()
    waiting_thread = getattr(AsyncToSync.executors, "current", None) or AsyncToSync.loop_thread_executors.get(loop)
    if waiting_thread is None:
        return current_transactions()
    try:
        return await sync_to_async(current_transactions)()
    except RuntimeError:  # this task has outlived the async_to_sync that it was made under
        return current_transactions()
