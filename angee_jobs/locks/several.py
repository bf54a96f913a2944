"""A lock on several keys: all of them, or none.

Each key has an entry and a hold of its own, as if its block were nested in that of the key before; so a loss, a renewal
or a transaction is what it is for one key. Taken in the order of canonical names, whatever order was given: two callers
cannot wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence
from datetime import datetime
from typing import Any, ClassVar, Unpack

from . import clock
from .acquiring import acquire, adopt, detach, extend, release
from .block import Entrance, Entry
from .concurrency import Canceller, Operations, TaskWaker, ThreadWaker, arun, run
from .errors import LockBackendError, LockError, LockLostError, lost_error
from .guard import guard
from .hold import Hold, OwnerId, State
from .keys import LockKey, as_lock_key
from .lock import Lock
from .options import DEFAULTS, LockOptions, Options
from .renewal import renewer
from .transactions import Transaction, current_transactions, transactions_of_task
from .types import LockInfo, Seconds

#: Between the owner ids of the holds of several keys, in the order of the keys.
BETWEEN = ","


class SeveralEntry(Entry):
    """One acquisition of several keys; its parts are the acquisitions of each."""

    __slots__ = ("cancel", "entrances", "parts")

    def __init__(self, entrance: Entrance | None = None) -> None:
        super().__init__(entrance)
        self.entrances: list[Entrance] = []
        self.parts: list[Entry] = []
        self.cancel: Canceller | None = None

    @property
    def holds(self) -> list[Hold]:
        return [part.hold for part in self.parts if part.hold is not None]

    @property
    def hold(self) -> Hold | None:
        """The one that speaks for all: the first that is lost, or else the first that has ended, or else the first."""
        holds = self.holds
        lost = [each for each in holds if each.state is State.LOST]
        ended = [each for each in holds if not each.live]
        return next(iter(lost or ended or holds), None)

    @hold.setter
    def hold(self, hold: Hold | None) -> None:
        """Its parts have one each."""

    def abandon(self) -> None:
        self.left = True
        self.statement = None
        for part in reversed(self.parts):
            part.abandon()

    # Entering.

    def enter(self, entrance: Entrance, raises: bool) -> bool:
        if entrance.options.cancel_on_loss:
            raise ValueError("cancel_on_loss cancels a task: it needs async with")
        transactions = current_transactions()
        run(self.take(entrance, entrance.options.timeout, ThreadWaker, transactions, renews=True, raises=raises))
        return entrance.remember(self, transactions)

    async def aenter(self, entrance: Entrance, raises: bool) -> bool:
        transactions = await transactions_of_task()
        await arun(self.take(entrance, entrance.options.timeout, TaskWaker, transactions, renews=True, raises=raises))
        entered = entrance.remember(self, transactions)
        if self.parts and entrance.options.cancel_on_loss:
            self.cancel = cancel = Canceller()
            for hold in self.holds:
                hold.on_lost = cancel.__call__  # bound: the cancellation is this entry's, and not that of its part
                if hold.state is State.LOST:
                    cancel()
        return entered

    def take(
        self,
        entrance: Entrance,
        wait: float | None,
        make_waker: Any,
        transactions: list[Transaction],
        *,
        renews: bool,
        raises: bool,
    ) -> Operations[bool]:
        """Whether all were acquired within ``wait`` seconds; of what cannot be had whole, nothing is kept."""
        assert isinstance(entrance, SeveralEntrance)
        options = entrance.options
        renews = renews and options.auto_extend
        end = clock.now() + (wait or 0.0)
        attached: dict[str, Entry] = {}
        if (
            self.is_block
            and isinstance(entrance.attached, SeveralEntry)
            and all(hold.live for hold in entrance.attached.holds)
        ):
            attached = {part.hold.name: part for part in entrance.attached.parts if part.hold is not None}
            entrance.attached.left, entrance.attached = True, None
        missing = []
        for key in entrance.in_order():
            own = Entrance(key, options)
            own.attached = attached.get(key.name)
            part = self._add(own)
            if not ((transactions or attached) and part.has_hold(own, transactions)):
                part.hold = own.new_hold()
                missing.append(part.hold)
        try:
            for hold in missing:
                left = None if wait is None else max(0.0, end - clock.now())
                if not (yield from acquire(hold, options, left, make_waker, renews=renews, raises=raises)):
                    yield from self._give_back()
                    return False
            return True
        except LockError:
            yield from self._give_back()
            raise

    def _add(self, entrance: Entrance) -> Entry:
        part = Entry()
        part.is_block, part.caller = self.is_block, self.caller
        self.entrances.append(entrance)
        self.parts.append(part)
        return part

    def _give_back(self) -> Operations[None]:
        """The newest first. What the transaction kept from an earlier block stays with it."""
        for part in reversed(self.parts):
            part.left = True
            if part.hold is not None and part.deferred is None and part.hold.state is State.HELD:
                with contextlib.suppress(LockBackendError):  # the background thread goes on trying
                    yield from release(part.hold)
        self.entrances, self.parts = [], []

    # Leaving.

    def leave(self, exc: BaseException | None) -> None:
        try:
            with _all_are_left(self) as errors:
                for part in reversed(self.parts):
                    with errors:
                        part.leave(exc)
        except LockError:
            raise
        except BaseException:
            self.abandon()
            raise

    async def aleave(self, exc: BaseException | None) -> None:
        if isinstance(exc, GeneratorExit):
            self.abandon()
            return
        failed: LockError | None = None
        try:
            with _all_are_left(self) as errors:
                for part in reversed(self.parts):
                    with errors:
                        await part.aleave(exc)
        except LockError as error:
            failed = error
        except BaseException:
            self.abandon()
            raise
        hold = self.hold
        if hold is not None and self.cancel is not None and self.cancel.disarm(exc):
            raise lost_error(hold.name) from exc
        if failed is not None:
            raise failed


class _FirstError:
    """Keeps the first error of a lock, so that the others are left too; a later one becomes a note of it."""

    error: LockError | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> bool:
        if not isinstance(exc, LockError):
            return False
        if self.error is None:
            self.error = exc
        else:
            self.error.add_note(str(exc))
        return True


@contextlib.contextmanager
def _all_are_left(entry: SeveralEntry) -> Iterator[_FirstError]:
    errors = _FirstError()
    try:
        yield errors
    finally:
        entry.left, entry.statement = True, None
    if errors.error is not None:
        raise errors.error


class SeveralEntrance(Entrance):
    """What a lock on several keys is entered through."""

    __slots__ = ("keys",)
    entry_class: ClassVar[type[Entry]] = SeveralEntry

    def __init__(self, keys: Sequence[LockKey], options: LockOptions, entry: Entry | None = None) -> None:
        super().__init__(keys[0], options, entry)
        self.keys = keys

    def in_order(self) -> list[LockKey]:
        """Each key once, in the order of the canonical names: duplicates are one."""
        backend = self.find_backend()
        scoped = {key.name: key for key in map(backend.scoped, self.keys)}
        return [scoped[name] for name in sorted(scoped)]

    def of(self, entry: Entry) -> Entrance:
        return SeveralEntrance(self.keys, self.options, entry)

    def remember(self, entry: Entry, transactions: list[Transaction]) -> bool:
        assert isinstance(entry, SeveralEntry)
        for entrance, part in zip(entry.entrances, entry.parts, strict=True):
            entrance.remember(part, transactions)
        self.keep(entry)
        return bool(entry.parts)


class SeveralLocks(Lock):
    """What ``lock([key, ...])`` gives: a :class:`Lock` that speaks for all its holds at once, and is lost with any."""

    def __init__(self, keys: Sequence[LockKey | str], **options: Unpack[Options]) -> None:
        self._entrance = entrance_of(keys, options)
        self.key = self._entrance.key

    @property
    def name(self) -> str:
        """The canonical names, with a comma between."""
        entrance = self._entrance
        assert isinstance(entrance, SeveralEntrance)
        return ", ".join(key.name for key in entrance.in_order())

    @property
    def _holds(self) -> list[Hold]:
        entry = self._entrance.current_entry()
        return entry.holds if isinstance(entry, SeveralEntry) else []

    def _acquire(self, entry: Entry, timeout: Seconds | None, make_waker: Any) -> Operations[bool]:
        assert isinstance(entry, SeveralEntry)
        wait = self._wait(timeout)
        acquired = yield from entry.take(self._entrance, wait, make_waker, [], renews=False, raises=False)
        if acquired:
            self._entrance.remember(entry, [])
        return acquired

    def _release(self) -> Operations[bool]:
        states = []
        for hold in reversed(self._holds):
            states.append((yield from release(hold)))
        return bool(states) and all(state is State.RELEASED for state in states)

    def _extend(self, seconds: float | None) -> Operations[bool]:
        extended = [hold.live for hold in self._holds]
        for number, hold in enumerate(self._holds):
            if extended[number]:
                extended[number] = yield from extend(hold, seconds)
        return bool(extended) and all(extended)

    def _detach(self, seconds: float | None) -> Operations[str]:
        self._checked()
        let_go: list[Hold] = []
        try:
            for hold in self._holds:
                owner = OwnerId((yield from detach(hold, seconds, self._entrance.options.note)))
                let_go.append(hold.of(owner))
        except BaseException:
            for hold in let_go:
                renewer.abandon(hold)
            raise
        return BETWEEN.join(hold.owner for hold in let_go)

    def _attach(self, entry: Entry, owner_id: str) -> Operations[None]:
        assert isinstance(entry, SeveralEntry)
        assert isinstance(self._entrance, SeveralEntrance)
        keys, owners = self._entrance.in_order(), owner_id.split(BETWEEN)
        if len(keys) != len(owners):
            raise LockLostError(f"There are no detached holds of {self.name} with this owner id", name=self.name)
        for key, owner in zip(keys, owners, strict=True):
            entrance = Entrance(key, self._entrance.options)
            hold = entry._add(entrance).hold = entrance.new_hold()
            yield from adopt(hold, OwnerId(owner), self._entrance.options.note)

    @property
    def owner_id(self) -> str | None:
        """The secrets of all holds, with which ``attach_lock()`` finds them."""
        return OwnerId(BETWEEN.join(hold.owner for hold in self._holds)) if self._holds else None

    @property
    def fencing_token(self) -> None:
        """None: each key has its own, in ``fencing_tokens``."""
        return None

    @property
    def slot(self) -> None:
        """None: each key has its own place."""
        return None

    @property
    def acquired_at(self) -> datetime | None:
        """When the last of the holds was granted."""
        return max((at for hold in self._holds if (at := hold.acquired_at) is not None), default=None)

    @property
    def expires_at(self) -> datetime | None:
        """When the first of the leases ends unless it is renewed."""
        return min((at for hold in self._holds if (at := hold.expires_at) is not None), default=None)

    def _info(self) -> Operations[LockInfo | None]:
        """Of the first key; None if any of the holds is gone."""
        found = []
        for hold in self._holds:
            found.append((yield from self._info_of(hold)))
        return found[0] if found and all(found) else None

    @contextlib.contextmanager
    def _guarded(self, using: str, seconds: float) -> Generator[None]:
        """Each of the keys; ``seconds`` is for each."""
        self._checked()  # without any hold there would be nothing to guard by, and no error
        with contextlib.ExitStack() as stack:
            for hold in self._holds:
                stack.enter_context(guard(functools.partial(self._checked, hold), using, seconds))
            yield


def entrance_of(key: Any, options: Any) -> Entrance:
    """What a lock on ``key``, or on a list of keys, is entered through. ValueError for an empty list."""
    checked = LockOptions.checked(options) if options else DEFAULTS
    if not isinstance(key, list):
        return Entrance(as_lock_key(key), checked)
    if not key:
        raise ValueError("a lock needs at least one key, and the list is empty")
    return SeveralEntrance([as_lock_key(each) for each in key], checked)
