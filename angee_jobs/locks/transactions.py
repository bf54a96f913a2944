"""Locks and the caller's transactions: a hold that lasts until the commit.

A lock that is freed at the end of its block, but before the commit, lets the next holder read what was there before.
So a block that is entered inside ``atomic()`` defers its release until the transaction has ended. The release is
registered with ``on_commit`` at the block's entry: callbacks run in order, and a task that the body enqueues there must
find the lock free. Nothing runs on a rollback; Django drops the callback then, and its finalizer tells us. If a
traceback still keeps it alive, the periodic job sees that it has left the connection's list.

Under ``TestCase`` the test's own transaction is never committed, and ``on_commit`` callbacks are counted by the
test's author. There, nothing is registered, and the outermost atomic that is not the test's is looked at instead.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from asgiref.sync import AsyncToSync, sync_to_async
from django.db import connections

from . import clock, process
from .backends.base import ALONE, OPERATION_SECONDS
from .background import Finalizer, background
from .errors import LockBackendError
from .hold import Hold
from .log import logger
from .renewal import renewer
from .types import printable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: How often the background thread looks whether a transaction has ended unnoticed, in seconds.
LOOK_SECONDS = 1.0


class Entered(Protocol):
    """The entry of a block: what a deferred release has to know of it."""

    left: bool


class Transaction:
    """One transaction of the calling thread that a block was entered in."""

    __slots__ = ("_connection", "_hook", "in_test_case", "outermost")

    def __init__(self, connection: BaseDatabaseWrapper, outermost: Any, in_test_case: bool) -> None:
        # Not kept alive. (Seen with a thread that ended in atomic(): its transaction stayed open, and its lock taken.)
        self._connection = weakref.ref(connection)
        self.outermost = outermost
        self.in_test_case = in_test_case
        self._hook: Finalizer | None = None

    def watch(self, deferred: DeferredRelease) -> None:
        if not self.in_test_case:

            def release_lock() -> None:
                self._hook = None
                deferred.finish(clock.now() + OPERATION_SECONDS)

            self._hook = background.when_dropped(release_lock, deferred.look)
            connection = self._connection()
            assert connection is not None  # its own thread is in here
            connection.on_commit(release_lock, robust=True)

    def same_as(self, other: Transaction) -> bool:
        return self._connection is other._connection and self.outermost is other.outermost

    @property
    def over(self) -> bool:
        """Whether it was committed or rolled back, or at least the savepoint that the block was entered in was.

        May be asked from any thread.
        """
        connection = self._connection()
        if connection is None:
            return True
        if self.in_test_case:
            return self.outermost not in list(connection.atomic_blocks)
        hook = self._hook() if self._hook is not None else None
        return hook is None or not any(entry[1] is hook for entry in list(connection.run_on_commit))


class DeferredRelease:
    """A hold that ends with its block and with every transaction that the block was entered in, the last of them.

    It is registered until the hold has ended, so that the periodic job releases what an exception of a signal handler
    has kept from being released. (Seen at the first instruction of the release at the commit: renewed for ever.)
    """

    def __init__(
        self,
        hold: Hold,
        transactions: list[Transaction],
        entry: Entered,
        release: Callable[[Hold, float, bool], object],
    ) -> None:
        self.hold = hold
        #: The block that has the hold now, or had it last. Not kept alive: one that is dropped is left.
        self._entry = weakref.ref(entry)
        # Re-entrant, since a signal handler that uses locks may interrupt this very thread in here.
        self._finishing = threading.RLock()
        self._release = release
        self._posted = False
        self._transactions = transactions
        deferred_releases[_key(hold)] = self
        for each in transactions:
            each.watch(self)
        background.announce(LOOK_SECONDS, clock.now() + LOOK_SECONDS)

    @property
    def pending(self) -> list[Transaction]:
        return [each for each in self._transactions if not each.over]

    def take_again(self, transactions: list[Transaction], entry: Entered) -> bool:
        """Let another block of the very transaction that has the hold have it; False if it may not."""
        pending = self.pending
        if not self._left or not self.hold.live or not pending:
            return False
        if not all(any(each.same_as(mine) for mine in transactions) for each in pending):
            return False
        new = [mine for mine in transactions if not any(each.same_as(mine) for each in pending)]
        self._transactions = pending + new
        for each in new:
            each.watch(self)
        self._entry = weakref.ref(entry)
        return True

    @property
    def _left(self) -> bool:
        entry = self._entry()
        return entry is None or entry.left

    @property
    def due(self) -> bool:
        """Whether nothing is left that the hold was kept for."""
        return self._left and not self.pending

    def finish(self, deadline: float, *, dispatch: bool = False) -> None:
        """Release once block and transactions have ended; waits for a release already running, until ``deadline``."""
        if not self._finishing.acquire(timeout=max(0.0, min(deadline - clock.now(), threading.TIMEOUT_MAX))):
            return
        try:
            if self.due:
                self._release(self.hold, deadline, dispatch)
        except LockBackendError as error:
            # Raised to nobody: the transaction is over. The background thread goes on trying.
            name = printable(self.hold.name)
            logger.error("The lock %s could not be released after its transaction: %s", name, error)
        finally:
            self._finishing.release()
            if self.hold.ended:
                self.drop()

    def look(self) -> None:
        """On the background thread, which asks no server itself: have the hold released if it is due."""
        if self.hold.ended or self.hold.foreign:
            self.drop()
        elif self.due and not self._posted:
            self._posted = True
            renewer.abandon(self.hold, by=self._finish_there)

    def _finish_there(self, deadline: float) -> None:
        self._posted = False
        self.finish(deadline, dispatch=True)

    def drop(self) -> None:
        if deferred_releases.get(_key(self.hold)) is self:
            deferred_releases.pop(_key(self.hold), None)  # a signal handler may have come in between


#: Every deferred release of this process, by backend, name, and the owner id if the key is shared; empty almost always.
deferred_releases: dict[tuple[object, str, str], DeferredRelease] = {}


def _key(hold: Hold) -> tuple[object, str, str]:
    return hold.backend, hold.name, hold.owner if hold.places else ""


def deferred_of(backend: object, name: str, places: int) -> list[DeferredRelease]:
    """Those that may be in the way of a hold, or be taken again by it. An exclusive one is told of its like alone.

    Another kind that a transaction kept is released within LOOK_SECONDS after its end.
    """
    if places == ALONE:
        kept = deferred_releases.get((backend, name, ""))
        return [] if kept is None else [kept]
    return [
        each for each in list(deferred_releases.values()) if each.hold.name == name and each.hold.backend is backend
    ]


def finish_all_deferred(backend: object, deadline: float) -> None:
    """Release what transactions kept that have ended unnoticed, before ``backend`` is asked what is held."""
    for deferred in list(deferred_releases.values()):
        if deferred.hold.backend is backend and clock.now() < deadline:
            deferred.finish(deadline)


def _look() -> float:
    for deferred in list(deferred_releases.values()):
        deferred.look()
    return clock.now() + LOOK_SECONDS if deferred_releases else math.inf


background.jobs.append(_look)
process.on_fork(in_child=deferred_releases.clear)


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
        # A list first, since a signal handler may open a connection meanwhile. "cvar" is what asgiref keeps for loops.
        return [each for alias, each in list(vars(storage).items()) if alias != "cvar"]
    return connections.all(initialized_only=True)


async def transactions_of_task() -> list[Transaction]:
    """Like :func:`current_transactions`, for a coroutine.

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
