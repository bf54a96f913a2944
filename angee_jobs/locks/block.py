"""One entry and exit of a ``with`` statement over a lock, sync and async.

The entry owns the hold that it won: a :class:`Lock` object that many threads or tasks use at once has nothing that one
of them could take from another. An exception may strike between any two instructions here too. A caller that is struck
on the way in undoes its entry; one that is struck on the way out leaves the hold to the background thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar

from . import process
from .acquiring import acquire, needs_lease, needs_places, release
from .backends.base import ALONE, SHARED, BaseLockBackend
from .background import Finalizer, background
from .concurrency import Canceller, Operations, TaskWaker, ThreadWaker, arun, run
from .conf import lock_backends
from .errors import LockBackendError, add_note, lost_error
from .hold import Hold, State
from .keys import LockKey
from .options import LockOptions
from .renewal import renewer
from .transactions import (
    DeferredRelease,
    Transaction,
    current_transactions,
    deferred_of,
    deferred_releases,
    transactions_of_task,
)


class Entry:
    """One acquisition through a lock, by :meth:`Lock.acquire` or a with statement: who made it, and its hold."""

    __slots__ = ("__weakref__", "caller", "deferred", "entrance", "hold", "is_block", "left", "statement")

    def __init__(self, entrance: Entrance | None = None) -> None:
        self.is_block = False
        #: Only of a with statement, and only until it is entered.
        self.entrance = entrance
        #: The thread or task; 0 before it has entered.
        self.caller = 0
        self.hold: Hold | None = None
        #: Whether the caller is through with it.
        self.left = False
        self.deferred: DeferredRelease | None = None
        #: Tells when the with statement is gone without having left the block.
        self.statement: Finalizer | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has no block, and its hold has ended."""
        return not self.is_block and self.hold is not None and self.hold.ended

    @property
    def state(self) -> State | None:
        return self.hold.state if self.hold is not None else None

    def abandon(self) -> None:
        """Its caller was struck, or is gone: the background thread or the transaction releases what is left of it."""
        self.left = True
        self.statement = None
        hold = self.hold
        if hold is None or hold.state is not State.HELD or hold.foreign:
            return
        if self.deferred is not None:
            background.post(self.deferred.look)
        else:
            renewer.abandon(hold)

    def dropped(self) -> None:
        """Its with statement is gone."""
        if self.caller and not self.left:
            self.abandon()
        self.statement = self.entrance = None

    # Entering.

    def enter(self, entrance: Entrance, raises: bool) -> bool:
        """Whether the lock was acquired for this block; LockNotAcquiredError instead of False if ``raises``."""
        options = entrance.options
        if options.cancel_on_loss:
            raise ValueError("cancel_on_loss cancels a task: it needs async with")
        transactions = current_transactions()
        known = (transactions or entrance.attached is not None) and self.has_hold(entrance, transactions)
        if not known:
            self.hold = hold = entrance.new_hold()
            acquiring = acquire(hold, options, options.timeout, ThreadWaker, renews=options.auto_extend, raises=raises)
            if not run(acquiring):
                self.hold = None
        return entrance.remember(self, transactions)

    async def aenter(self, entrance: Entrance, raises: bool) -> bool:
        """:meth:`enter` for a coroutine."""
        options = entrance.options
        transactions = await transactions_of_task()
        if not self.has_hold(entrance, transactions):
            self.hold = hold = entrance.new_hold()
            acquiring = acquire(hold, options, options.timeout, TaskWaker, renews=options.auto_extend, raises=raises)
            if not await arun(acquiring):
                self.hold = None
        entered = entrance.remember(self, transactions)
        if self.hold is not None and options.cancel_on_loss:
            self.hold.on_lost = cancel = Canceller()
            if self.hold.state is State.LOST:
                cancel()
        return entered

    def has_hold(self, entrance: Entrance, transactions: list[Transaction]) -> bool:
        """Whether there is a hold for this block already: one that was attached, or that the transaction kept."""
        attached = entrance.attached
        if attached is not None and attached.hold is not None and attached.hold.live:
            entrance.attached = None
            self.hold = attached.hold
            self.hold.handle = None  # from now on it goes with the block
            attached.left = True
            if entrance.options.auto_extend:
                renewer.start_renewing(self.hold)
            return True
        if transactions and deferred_releases:
            backend = entrance.find_backend()
            places = entrance.places
            for deferred in deferred_of(backend, backend.scoped(entrance.key).name, places):
                if deferred.hold.places == places and deferred.take_again(transactions, self):
                    self.hold, self.deferred = deferred.hold, deferred
                    return True
        return False

    # Leaving. The body's exception is never hidden; what else went wrong becomes a note of it.

    def leave(self, exc: BaseException | None) -> None:
        try:
            run(self._leave(exc))
        except LockBackendError:
            raise
        except BaseException:
            self.abandon()
            raise
        self._tell_body(exc)

    async def aleave(self, exc: BaseException | None) -> None:
        if isinstance(exc, GeneratorExit):  # the coroutine is being thrown away, and may not wait
            self.abandon()
            return
        try:
            await arun(self._leave(exc))
        except LockBackendError:
            raise
        except BaseException:
            self.abandon()
            raise
        hold = self.hold
        if hold is not None and isinstance(hold.on_lost, Canceller) and hold.on_lost.disarm(exc):
            raise lost_error(hold.name) from exc
        self._tell_body(exc)

    def _leave(self, exc: BaseException | None) -> Operations[None]:
        process.check()
        hold, deferred = self.hold, self.deferred
        try:
            if hold is None or hold.foreign:
                return  # refused, or a forked child that leaves its parent's block
            if deferred is not None:
                if hold.over and not hold.ended:
                    renewer.expire(hold)
                if not hold.ended and deferred.pending:
                    return  # from now on the hold belongs to the transaction
                deferred.drop()
            yield from release(hold)
        except LockBackendError as error:
            assert hold is not None
            if exc is None:
                raise
            add_note(exc, f"The lock {hold.name} could not be released: {error}")
        finally:
            self.left = True
            self.statement = None

    def _tell_body(self, exc: BaseException | None) -> None:
        """Tell a loss, if it was one."""
        hold = self.hold
        if hold is not None and not hold.foreign and hold.state is State.LOST:
            if exc is None:
                raise lost_error(hold.name)
            add_note(exc, f"The lock {hold.name} had been lost before the block was left")


#: The entry that a thread is just making, from the look at ``__exit__`` to the call of ``__enter__``.
opening: dict[int, Entry] = {}
process.on_fork(in_child=opening.clear)


# What the interpreter calls to enter a block. The try statements stand in these very functions: between the return of a
# call and the caller's own try there is an instruction at which a signal can strike.


def enter(form: Any, raises: bool = True) -> Any:
    """``Lock.__enter__``: a lock that speaks for the hold of this block. For ``task_lock``, whether it was acquired."""
    entry = form._entrance.opened()
    try:
        acquired = entry.enter(form._entrance, raises)
        return _lock_of(form, entry) if raises else acquired
    except BaseException:
        entry.abandon()
        raise


def aenter(form: Any, raises: bool = True) -> Coroutine[Any, Any, Any]:
    """:func:`enter` for ``async with``; a plain function, so that the entry is made with the statement."""
    return _aenter(form, form._entrance.opened(), raises)


async def _aenter(form: Any, entry: Entry, raises: bool) -> Any:
    try:
        acquired = await entry.aenter(form._entrance, raises)
        return _lock_of(form, entry) if raises else acquired
    except BaseException:
        entry.abandon()
        raise


def _lock_of(lock: Any, entry: Entry) -> Any:
    held = object.__new__(type(lock))
    entrance = lock._entrance.of(entry)
    held.__dict__ = {**lock.__dict__, "key": entrance.key, "_entrance": entrance}
    return held


class Entrance:
    """What a lock object is entered through, by many threads and tasks at once: key, options, and the entries made."""

    __slots__ = ("attached", "entries", "key", "options")
    entry_class: ClassVar[type[Entry]] = Entry

    def __init__(self, key: LockKey, options: LockOptions, entry: Entry | None = None) -> None:
        self.key = key
        self.options = options
        #: What was made through the lock and is not over, and the last that is.
        self.entries = [] if entry is None else [entry]
        #: A hold that was attached and waits for the block that it is meant for.
        self.attached: Entry | None = None

    @property
    def places(self) -> int:
        """Who else may hold the key beside a hold that is asked for: ALONE, SHARED, or a number of places."""
        return self.options.slots or (SHARED if self.options.shared else ALONE)

    def find_backend(self) -> BaseLockBackend:
        """The backend of the alias as it is configured now."""
        backend = self.options.backend
        if type(backend) is str and (known := lock_backends.known.get(backend)) is not None:
            return known
        if isinstance(backend, BaseLockBackend):
            return backend
        return lock_backends.operations(backend)

    def new_hold(self) -> Hold:
        """A hold that is still to be asked for."""
        backend, key, options = self.find_backend(), self.key, self.options
        if backend.namespace:
            key = backend.scoped(key)
        if options.hold_at_least is not None:
            needs_lease(backend, "hold_at_least")
        ttl, places = options.ttl or backend.ttl, self.places
        if places:
            needs_places(backend, places)
        return Hold(key, backend, ttl if options.hold_at_most is None else min(ttl, options.hold_at_most), places)

    def opened(self) -> Entry:
        """The entry of the with statement that is being entered; a new one if ``__enter__`` is called by hand."""
        if os.getpid() != process.pid:
            process.check()
        entry = opening.pop(threading.get_ident(), None) if opening else None
        if entry is None or entry.statement is None or entry.statement() is None or not self._is_for(entry):
            entry = self.entry_class()  # the other one was only looked at
        entry.entrance = None
        entry.is_block = True
        entry.caller = calling()
        return entry

    def _is_for(self, entry: Entry) -> bool:
        return entry.entrance in (None, self) and type(entry) is self.entry_class

    def of(self, entry: Entry) -> Entrance:
        """For what a block yields, which speaks for ``entry`` alone."""
        return Entrance(self.key if entry.hold is None else entry.hold.key, self.options, entry)

    def new_entry(self) -> Entry:
        """An entry without a block, whose hold is still to be asked for."""
        process.check()
        entry = self.entry_class()
        entry.caller = calling()
        if self.entry_class is Entry:
            entry.hold = self.new_hold()
        return entry

    def remember(self, entry: Entry, transactions: list[Transaction]) -> bool:
        """Note that ``entry`` was made through the lock, and forget what is over there; whether it has a hold.

        A loss is kept for its caller: the next hold of another thread on the same object does not hide it.
        """
        hold = entry.hold
        if hold is not None:
            if transactions and entry.deferred is None:
                entry.deferred = DeferredRelease(hold, transactions, entry, _release_deferred)
            if entry.statement is None:
                hold.handle = background.when_dropped(entry, functools.partial(_entry_dropped, hold))
        self.keep(entry)
        return hold is not None

    def keep(self, entry: Entry) -> None:
        entries = self.entries
        for each in list(entries) if entries else ():
            if each.left or (each.is_over and (each.caller == entry.caller or each.state is not State.LOST)):
                with contextlib.suppress(ValueError):
                    entries.remove(each)
        entries.append(entry)

    def current(self) -> Hold | None:
        entry = self.current_entry()
        return None if entry is None else entry.hold

    def current_entry(self) -> Entry | None:
        """What the caller means: its own innermost entry, or else the last one of any caller that has a live hold."""
        process.check()
        entries = self.entries
        if len(entries) < 2:
            return entries[0] if entries else None
        entries = list(entries)
        caller = calling()
        for each in reversed(entries):
            if each.caller == caller and not each.left and (not each.is_over or each.state is State.LOST):
                return each
        for each in reversed(entries):
            if not each.left and each.hold is not None and each.hold.live:
                return each
        return entries[-1]


def _entry_dropped(hold: Hold) -> None:
    """No lock object has the entry of ``hold`` any more, so no caller can release it."""
    deferred = next((each for each in deferred_of(hold.backend, hold.name, hold.places) if each.hold is hold), None)
    if deferred is not None:
        deferred.look()
    else:
        renewer.abandon(hold)


def _release_deferred(hold: Hold, deadline: float, dispatch: bool) -> None:
    run(release(hold, before=deadline, dispatch=dispatch))


def calling() -> int:
    """What an entry belongs to: the running task, or else the thread."""
    if asyncio._get_running_loop() is None:  # current_task() would raise, which costs more than the rest of a block
        return threading.get_ident()
    return id(asyncio.current_task())
