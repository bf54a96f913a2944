"""What a lock does, as steps (see ``steps.py``): take a hold, extend it, hand it over, give it up.

An exception may strike at any instruction: a signal handler's (Celery's soft time limit is one), or a cancellation.
So a hold, with its owner id, exists before the request that may win it, and whoever is struck between the request and
the moment when the hold is known hands it to the renewal thread, which releases by owner id whatever came of it.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from . import clock, signals
from .backends.base import VERB_SECONDS, BaseLockBackend, Extension, Grant, HandleBackend
from .concurrency import Call, Sleep, Steps, ThreadBell
from .errors import LockBackendError, LockLostError, LockNotAcquiredError
from .hold import End, Hold, new_owner_id
from .holder import describe_holder
from .renewal import renewer
from .transactions import settle
from .waiting import room_of, wait_in_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from .concurrency import Bell
    from .keys import LockKey
    from .types import LockInfo

logger = logging.getLogger("angee_jobs.locks")

#: How often a coroutine asks a backend that has only ``try_acquire``, in seconds.
HANDLE_POLL_SECONDS = 0.05


def lost_error(name: str) -> LockLostError:
    return LockLostError(f"The hold of {name} ended before it was released", name=name)


def leases_only(backend: BaseLockBackend, what: str) -> None:
    """ImproperlyConfigured if ``backend`` holds by connections, where ``what`` cannot be done."""
    if not backend.leases:
        raise ImproperlyConfigured(
            f"{what} needs a lease, and the locks of {backend.alias!r} ({type(backend).__name__}) live and die with "
            f"a connection of this process. Use backend= with an alias of TableLockBackend or RedisLockBackend."
        )


def acquire_steps(
    backend: BaseLockBackend,
    key: LockKey,
    name: str,
    *,
    wait: float | None,
    ttl: float | None,
    note: str,
    renews: bool,
    at_least: float | None,
    at_most: float | None,
    make_bell: Callable[[], Bell],
    raises: bool,
    take: Callable[[Hold], None],
) -> Steps[Hold | None]:
    """The new hold, after ``take`` was told of it; None if refused, or LockNotAcquiredError if ``raises``."""
    if at_least is not None:
        leases_only(backend, "hold_at_least")
    room = room_of(backend)
    seconds = ttl or backend.ttl
    hold = Hold(key, name, backend, room, seconds if at_most is None else min(seconds, at_most))
    holder = describe_holder(note, hold.ttl if backend.leases else None)
    began = clock.now()
    waits = bool(wait)

    def attempt(deadline: float, *, next_in_line: bool = False) -> Grant | None:
        hold.started = clock.now()
        acquire = backend.acquire_next if next_in_line else backend.acquire
        return acquire(name, hold.owner, hold.ttl, holder, deadline)

    try:
        limit = began + VERB_SECONDS if not wait else began + min(wait, VERB_SECONDS)
        grant: Grant | None = None
        if isinstance(backend, HandleBackend):
            if room.bindings:
                yield Call(settle)
            grant = yield from _handle_steps(backend, hold, wait, make_bell())
            wait = None
        elif not wait or name not in room.lines:  # a newcomer who will wait does not overtake those who do
            bound = bool(room.bindings)  # asked before the try: one that is being settled may be gone after it
            grant = yield Call(attempt, limit, hold=hold)
            if grant is None and bound:
                yield Call(settle)  # the holder's transaction may be over without anybody having noticed
                grant = yield Call(attempt, limit, hold=hold)
        if grant is None and wait:
            attempt_next = functools.partial(attempt, next_in_line=True)
            grant = yield from wait_in_line(room, hold, began + wait, make_bell(), attempt_next)
        if grant is None:
            yield from _refused_steps(backend, key, name, clock.now() - began, raises, 0.2 if waits else 1.0)
            return None
        if at_least is not None:
            hold.keep_until = hold.started + at_least
        if at_most is not None:
            hold.latest_end = hold.started + at_most
        hold.grant(grant, renews=renews)
        renewer.add(hold)
        take(hold)
        if signals.lock_acquired.receivers:
            signals.tell(
                signals.lock_acquired,
                type(backend),
                key=key,
                backend=backend.alias,
                fencing_token=hold.fencing_token,
                waited=clock.now() - began,
            )
        return hold
    except LockNotAcquiredError:
        raise
    except BaseException as error:
        renewer.take_back(hold, error)
        raise


def _handle_steps(backend: HandleBackend, hold: Hold, wait: float | None, bell: Bell) -> Steps[Grant | None]:
    """Let a backend that waits by itself do so; but coroutines share a few threads, so for them it is asked again."""
    hold.started = clock.now()
    if isinstance(bell, ThreadBell):
        grant: Grant | None = yield Call(backend.acquire_within, hold.key, hold.owner, wait, hold=hold)
        return grant
    end = hold.started + (wait or 0.0)
    while True:
        grant = yield Call(backend.acquire_within, hold.key, hold.owner, None, hold=hold)
        left = end - clock.now()
        if grant is not None or left <= 0:
            return grant
        yield Sleep(bell, min(HANDLE_POLL_SECONDS, left))
        hold.started = clock.now()


def _refused_steps(
    backend: BaseLockBackend, key: LockKey, name: str, waited: float, raises: bool, patience: float
) -> Steps[None]:
    """Make the refusal visible; the holder is looked up, for ``patience`` seconds, only if somebody is to see it."""
    holder: LockInfo | None = None
    if raises or signals.lock_refused.receivers or logger.isEnabledFor(logging.INFO):
        holder = yield from _look_steps(backend, name, patience)
    who = f", held by {holder.holder}" if holder is not None and holder.holder is not None else ""
    logger.info("Refused the lock %s after %.3f s%s", name, waited, who)
    signals.tell(signals.lock_refused, type(backend), key=key, backend=backend.alias, waited=waited, holder=holder)
    if raises:
        raise LockNotAcquiredError(f"The lock {name} is taken{who}", name=name, holder=holder)


def _look_steps(backend: BaseLockBackend, name: str, patience: float) -> Steps[LockInfo | None]:
    """Who holds ``name``, for a message: None also if that cannot be told."""
    try:
        record = yield Call(backend.inspect, name, clock.now() + patience)
        return None if record is None else backend.info(record)
    except Exception:
        return None


def adopt_steps(
    backend: BaseLockBackend, key: LockKey, name: str, owner: str, *, ttl: float | None, note: str
) -> Steps[Hold]:
    """The hold that takes the place of the detached one of ``owner``; LockLostError if that is gone."""
    leases_only(backend, "attach_lock()")
    hold = Hold(key, name, backend, room_of(backend), ttl or backend.ttl)
    try:
        hold.started = clock.now()
        limit = hold.started + VERB_SECONDS
        grant: Grant | None = yield Call(
            backend.adopt, name, owner, hold.owner, hold.ttl, describe_holder(note, hold.ttl), limit, hold=hold
        )
        if grant is None:
            raise LockLostError(
                f"There is no detached hold of {name} with this owner id: it ran out, or somebody attached it before",
                name=name,
            )
        hold.grant(grant, renews=False)
        renewer.add(hold)
        return hold
    except LockLostError:
        raise
    except BaseException as error:
        renewer.take_back(hold, error)
        raise


def detach_steps(hold: Hold, ttl: float | None, note: str) -> Steps[str]:
    """The owner id of the hold's heir, whom nobody holds yet."""
    leases_only(hold.backend, "detach()")
    if not hold.end(End.DETACHED):
        raise lost_error(hold.name)
    renewer.forget(hold)
    heir, length = new_owner_id(), ttl or hold.ttl
    limit = min(clock.now() + VERB_SECONDS, hold.deadline)
    try:
        grant: Grant | None = yield Call(
            hold.backend.adopt, hold.name, hold.owner, heir, length, describe_holder(note, length), limit, hold=hold
        )
    except BaseException:
        # Whether it is the heir's by now, nobody knows, and nobody will ever know the heir: free it from either.
        renewer.abandon(hold)
        renewer.abandon(hold.of(heir))
        raise
    if grant is None:
        hold.found_lost()
        renewer.tell_loss(hold, "the backend did not know it any more when it was detached")
        raise lost_error(hold.name)
    return heir


def extend_steps(hold: Hold, ttl: float | None) -> Steps[bool]:
    """Whether the live ``hold`` was extended."""
    seconds = min(ttl or hold.ttl, max(hold.latest_end - clock.now(), 0.001))
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


def finish_steps(hold: Hold) -> Steps[End | None]:
    """Give up ``hold``: RELEASED, LOST if it was gone already, or None if somebody else has ended it."""
    if hold.foreign:
        return None
    try:
        if hold.over and hold.ended is None:
            renewer.expire(hold)
            return End.LOST
        if not hold.end(End.RELEASED):
            return End.LOST if hold.ended is End.LOST else None
        renewer.forget(hold)
        now = clock.now()
        limit = min(now + VERB_SECONDS, max(hold.deadline, now + 0.25))
        released = yield Call(hold.give_up, limit, hold=hold)
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
    if hold.room.lines:
        hold.room.changed(hold.name)
    if signals.lock_released.receivers:
        signals.tell(
            signals.lock_released,
            type(hold.backend),
            key=hold.key,
            backend=hold.backend.alias,
            fencing_token=hold.fencing_token,
            held_for=clock.now() - hold.started,
        )
    return End.RELEASED
