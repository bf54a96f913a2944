"""Acquiring, adopting, extending, detaching and releasing a hold, as generators of operations (``concurrency.py``).

An exception may strike at any instruction: a signal handler's (Celery's soft time limit is one), or a cancellation.
So a hold, with its owner id, exists before the request that may win it. A caller that is struck between the request and
the moment when the hold is known abandons it: the background thread releases by owner id, whatever the request did.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation

from . import clock, signals
from .backends.base import OPERATION_SECONDS, SHARED, BaseLockBackend, Extension, Grant, places_of
from .backends.third_party import HandleBackend
from .background import background
from .concurrency import Call, Operations, Sleep, ThreadWaker, Waker
from .errors import LockBackendError, LockLostError, LockNotAcquiredError, lost_error
from .hold import Hold, State, new_owner_id
from .holder import describe_holder, describes_this_thread
from .log import logger
from .options import LockOptions
from .renewal import renewer
from .transactions import deferred_of, deferred_releases
from .types import LockInfo, printable
from .waiting import wait_for_turn, waiters_of

#: How often a coroutine asks a backend that has only ``try_acquire``, in seconds.
HANDLE_POLL_SECONDS = 0.05
#: How long a refused caller looks for the holder, in seconds: one that did not want to wait, and one that has waited.
LOOK_SECONDS, LOOK_AFTER_WAIT_SECONDS = 1.0, 0.2


def needs_lease(backend: BaseLockBackend, what: str) -> None:
    """ImproperlyConfigured if ``backend`` holds by connections, where ``what`` cannot be done."""
    if not backend.leases:
        raise ImproperlyConfigured(
            f"{what} needs a lease, and the locks of {backend.alias!r} ({type(backend).__name__}) live and die with "
            f"a connection of this process. Use backend= with an alias of TableLockBackend or RedisLockBackend."
        )


def needs_places(backend: BaseLockBackend, places: int) -> None:
    """ImproperlyConfigured if ``backend`` cannot share a key so: it would exclude more, or less, than is asked."""
    if places > backend.most_places or not backend.most_places:
        what = "shared=True" if places == SHARED else f"slots={places}"
        most = f"has at most {backend.most_places} places" if backend.most_places else "has none"
        raise ImproperlyConfigured(
            f"{what} needs places for several holders, and {backend.alias!r} ({type(backend).__name__}) {most}. "
            f"Use backend= with an alias of TableLockBackend or RedisLockBackend."
        )


def acquire(
    hold: Hold,
    options: LockOptions,
    wait: float | None,
    make_waker: Callable[[], Waker],
    *,
    renews: bool,
    raises: bool,
) -> Operations[bool]:
    """Whether ``hold`` was granted within ``wait`` seconds; LockNotAcquiredError instead of False if ``raises``."""
    backend, name = hold.backend, hold.name
    holder = describe_holder(options.note, hold.ttl if backend.leases else None, hold.places)
    began = hold.started = clock.now()

    def attempt(deadline: float, *, as_waiter: bool = False) -> Grant | None:
        hold.started = clock.now()
        request = backend.acquire_next if as_waiter else backend.acquire
        return request(name, hold.owner, hold.ttl, holder, deadline)

    try:
        limit = began + (min(wait, OPERATION_SECONDS) if wait else OPERATION_SECONDS)
        grant: Grant | None = None
        waits = bool(wait)
        # Asked before the attempt: one that is being released meanwhile may be gone after it.
        kept = deferred_of(backend, name, hold.places) if deferred_releases else []
        if isinstance(backend, HandleBackend):
            for each in kept:
                yield Call(each.finish, limit)
            grant = yield from _acquire_handle(backend, hold, wait, make_waker())
            waits = False
        elif not waits or backend.waiters is None or name not in waiters_of(backend).queues:
            # A newcomer who would wait does not overtake those who do.
            first = Call(backend.acquire, name, hold.owner, hold.ttl, holder, limit)
            first.hold = hold
            grant = yield first
            if grant is None and kept:
                for each in kept:
                    yield Call(each.finish, limit)  # its transaction may have ended unnoticed
                grant = yield Call.of(hold, attempt, limit)
        if grant is None and waits:
            assert wait is not None
            attempt_next = functools.partial(attempt, as_waiter=True)
            grant = yield from wait_for_turn(waiters_of(backend), hold, began + wait, make_waker(), attempt_next)
        if grant is None:
            looks = LOOK_AFTER_WAIT_SECONDS if wait else LOOK_SECONDS
            yield from _refuse(hold, clock.now() - began, raises, looks)
            return False
        _granted(hold, grant, options, began, renews=renews)
        return True
    except (LockNotAcquiredError, ImproperlyConfigured, SynchronousOnlyOperation):
        raise  # nothing was granted
    except BaseException as error:
        _abandon_attempt(hold, error)
        raise


def _granted(hold: Hold, grant: Grant, options: LockOptions, began: float, *, renews: bool) -> None:
    if options.hold_at_least is not None:
        hold.keep_until = hold.started + options.hold_at_least
    if options.hold_at_most is not None:
        hold.latest_end = hold.started + options.hold_at_most
    renewer.watch(hold, grant, renews=renews)
    if signals.lock_acquired.receivers:
        signals.tell(
            signals.lock_acquired,
            type(hold.backend),
            key=hold.key,
            backend=hold.backend.alias,
            fencing_token=hold.fencing_token,
            waited=clock.now() - began,
        )


def _abandon_attempt(hold: Hold, error: BaseException) -> None:
    """Schedule a release, unless the error proves that nothing was sent."""
    if not isinstance(error, LockBackendError) or error.uncertain:
        renewer.abandon(hold)
        background.ensure_running()  # it may be the first hold of the process


def _acquire_handle(backend: HandleBackend, hold: Hold, wait: float | None, waker: Waker) -> Operations[Grant | None]:
    """Let a backend that waits by itself do so; but coroutines share a few threads, so for them it is asked again."""
    hold.started = clock.now()
    if isinstance(waker, ThreadWaker):
        grant: Grant | None = yield Call.of(hold, backend.acquire_within, hold.key, hold.owner, wait)
        return grant
    end = hold.started + (wait or 0.0)
    while True:
        grant = yield Call.of(hold, backend.acquire_within, hold.key, hold.owner, None)
        left = end - clock.now()
        if grant is not None or left <= 0:
            return grant
        yield Sleep(waker, min(HANDLE_POLL_SECONDS, left))
        hold.started = clock.now()


def _refuse(hold: Hold, waited: float, raises: bool, seconds: float) -> Operations[None]:
    """Make the refusal visible; the holder is looked up, for ``seconds``, only if it is going to be seen."""
    backend, name = hold.backend, hold.name
    holder: LockInfo | None = None
    if backend.inspectable and (raises or signals.lock_refused.receivers or logger.isEnabledFor(logging.INFO)):
        holder = yield from _look_up(backend, name, seconds)
    who = ""
    if holder is not None and holder.holder is not None:
        who = f", held by {holder.holder}{' (this very thread)' if describes_this_thread(holder.holder) else ''}"
    logger.info("Refused the lock %s after %.3f s%s", printable(name), waited, who)
    signals.tell(signals.lock_refused, type(backend), key=hold.key, backend=backend.alias, waited=waited, holder=holder)
    if raises:
        raise LockNotAcquiredError(f"The lock {name} is taken{who}", name=name, holder=holder)


def _look_up(backend: BaseLockBackend, name: str, seconds: float) -> Operations[LockInfo | None]:
    """Who holds ``name``, for a message: None also if that cannot be told."""
    try:
        record = yield Call(backend.inspect, name, clock.now() + seconds)
        return None if record is None else backend.info(record)
    except Exception:
        return None


def adopt(hold: Hold, owner: str, note: str) -> Operations[None]:
    """Let ``hold`` take the place of the detached one of ``owner``; LockLostError if that is gone."""
    needs_lease(hold.backend, "attach_lock()")
    try:
        hold.share_as(places_of(owner))
        hold.started = clock.now()
        limit = hold.started + OPERATION_SECONDS
        holder = describe_holder(note, hold.ttl, hold.places)
        grant: Grant | None = yield Call.of(
            hold, hold.backend.adopt, hold.name, owner, hold.owner, hold.ttl, holder, limit
        )
        if grant is None:
            raise LockLostError(
                f"There is no detached hold of {hold.name} with this owner id: it ran out, or was attached before",
                name=hold.name,
            )
        renewer.watch(hold, grant, renews=False)
    except LockLostError:
        raise
    except BaseException as error:
        _abandon_attempt(hold, error)
        raise


def detach(hold: Hold, ttl: float | None, note: str) -> Operations[str]:
    """The owner id of the hold's new owner, which no process has yet."""
    needs_lease(hold.backend, "detach()")
    new_owner, length = new_owner_id(hold.places), ttl or hold.ttl
    try:
        if not renewer.end(hold, State.DETACHED):
            raise lost_error(hold.name)
        limit = min(clock.now() + OPERATION_SECONDS, hold.deadline)
        holder = describe_holder(note, length, hold.places)
        grant: Grant | None = yield Call.of(
            hold, hold.backend.adopt, hold.name, hold.owner, new_owner, length, holder, limit
        )
        if grant is None:
            renewer.lose_released(hold, "the backend did not know it any more when it was detached")
            raise lost_error(hold.name)
        return new_owner
    except LockLostError:
        raise
    except BaseException:
        # The new owner may have it by now, and its owner id will never be known: free it from either.
        renewer.abandon(hold)
        renewer.abandon(hold.of(new_owner))
        raise


def extend(hold: Hold, ttl: float | None) -> Operations[bool]:
    """Whether the live ``hold`` was extended."""
    seconds = min(ttl or hold.ttl, max(hold.latest_end - clock.now(), 0.001))
    sent = clock.now()
    limit = min(sent + OPERATION_SECONDS, hold.deadline)
    extended = yield Call(hold.backend.extend, [Extension(hold.name, hold.owner, seconds)], limit)
    if hold.owner not in extended:
        renewer.lose(hold, "the backend does not know it any more")
        return False
    if hold.ended:
        if hold.state is State.LOST:  # told meanwhile: it may not come back
            renewer.abandon(hold)
        return False
    hold.extended(sent, seconds)
    return True


def release(hold: Hold, *, before: float | None = None, dispatch: bool = False) -> Operations[State | None]:
    """Release ``hold``: RELEASED, LOST if it was gone already, or None if another caller has ended it.

    ``before`` is an earlier end of the request than usual. With ``dispatch`` the signal goes out on a thread for it.
    """
    if hold.foreign:
        return None
    try:
        if hold.over and not hold.ended:
            renewer.expire(hold)
            return State.LOST
        if not renewer.end(hold, State.RELEASED):
            return State.LOST if hold.state is State.LOST else None
        now = clock.now()
        limit = min(now + OPERATION_SECONDS, max(hold.deadline, now + 0.25))
        if before is not None:
            limit = min(limit, before)
        released = yield Call.of(hold, hold.release_at_backend, limit)
        if not released:
            renewer.lose_released(hold, "the backend did not know it any more when it was released")
            return State.LOST
    except LockBackendError as error:
        renewer.abandon(hold)
        if hold.over:
            renewer.lose_released(hold, f"its lease ran out while it could not be released: {error}")
            return State.LOST
        raise
    except BaseException:
        renewer.abandon(hold)
        raise
    renewer.tell_release(hold, dispatch=dispatch)
    return State.RELEASED
