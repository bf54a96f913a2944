"""Questions and interventions from outside of a hold: who holds what, free it by force, reap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import clock, process, signals
from .backends.base import OPERATION_SECONDS, BaseLockBackend, Record
from .backends.third_party import HandleBackend
from .conf import lock_backends
from .keys import LockKey, as_lock_key
from .log import logger
from .renewal import renewer
from .transactions import finish_all_deferred
from .types import LockInfo, Seconds, grace_seconds, printable

#: How many holds one statement of a reap removes.
REAP_BATCH = 1000


def task_lock_is_held(key: LockKey | str, *, backend: str = "default") -> bool:
    """Whether somebody holds ``key`` now: what a try would be refused for.

    Only for showing. To act on it, take the lock: the answer may be out of date when it arrives. LockBackendError
    if the backend cannot tell.

    Example::

        run.is_stalled = run.running and not task_lock_is_held(run.lock_key)
    """
    operations, deadline = about_to_ask(backend)
    if isinstance(operations, HandleBackend):
        return operations.is_held(operations.scoped(as_lock_key(key)))
    return operations.inspect(operations.scoped(as_lock_key(key)).name, deadline) is not None


def task_locks_are_cross_process(*, backend: str = "default") -> bool:
    """Whether the locks of ``backend`` exclude other processes too; a dashboard may trust them only then."""
    return bool(getattr(lock_backends[backend], "cross_process", False))


def lock_info(key: LockKey | str, *, backend: str = "default") -> LockInfo | None:
    """Who holds ``key`` now, or None. The owner id is hidden. LockBackendError if the backend cannot tell.

    Of several holders (``slots=``, ``shared=True``) it tells of one; :func:`held_locks` of all.

    Example::

        info = lock_info("billing-run")
        print(info and info.holder)
    """
    operations, deadline = about_to_ask(backend)
    record = operations.inspect(operations.scoped(as_lock_key(key)).name, deadline)
    return None if record is None else operations.info(record)


def held_locks(*, key: LockKey | str | None = None, backend: str = "default") -> Iterator[LockInfo]:
    """Every hold that is live now, or those of one ``key``, in no particular order.

    Fetched in pages, so there may be very many.

    LockBackendError if the backend cannot be asked, or is one that cannot list its holds.

    Example::

        for info in held_locks(backend="leases"):
            print(info.name, info.holder, info.expires_at)
    """
    operations, deadline = about_to_ask(backend)
    if key is None:
        return map(operations.info, operations.list_held(deadline))
    return map(operations.info, operations.inspect_many([operations.scoped(as_lock_key(key)).name], deadline))


def force_release(
    key: LockKey | str,
    *,
    reason: str = "",
    user: Any = None,
    fencing_token: int | None = None,
    backend: str = "default",
) -> bool:
    """Free ``key``, also of all its shared holds; False if it was free.

    The holder is not stopped: it learns of the loss at its next renewal or check, and its late release does nothing.
    Whatever it protects may be done twice, so look first whether it still runs. ``reason`` and ``user`` are logged.
    With ``fencing_token`` only that hold is ended: False if the key has another one by now. A session lock is given up
    by its own process, which is asked to: LockBackendError if it does not do so.

    Example::

        force_release("billing-run", reason="worker-3 was switched off", user=request.user)
    """
    key = as_lock_key(key)
    if fencing_token is not None and type(fencing_token) is not int:
        raise TypeError(f"fencing_token must be an int, not {type(fencing_token).__name__}: {fencing_token!r}")
    process.check()
    operations = lock_backends.operations(backend)
    name = operations.scoped(key).name
    if fencing_token is not None and not 0 < fencing_token < 2**63:
        return False  # no hold has such a one
    only = {} if fencing_token is None else {"fencing_token": fencing_token}
    ended = operations.force_release(name, clock.now() + OPERATION_SECONDS, **only)
    if ended is None:
        return False
    logger.warning("The lock %s was released by force (%s)", printable(name), _who_and_why(user, reason))
    for hold in list(renewer.holds):  # one of this process need not wait for its renewal to be told
        same = hold.backend is operations and hold.name == name
        if same and (hold.fencing_token == ended.fencing_token or (hold.places and fencing_token is None)):
            renewer.lose(hold, "it was released by force")
    operations.changed(name)
    return True


def holds_beside(key: LockKey | str, *, backend: str = "default") -> tuple[int, list[LockInfo]] | None:
    """For a session lock: the server process that holds ``key``, and all the holds that would end with it.

    None if nobody holds it, or if the holds of this backend do not hang on sessions.
    """
    operations = lock_backends.operations(backend)
    ask = getattr(operations, "holds_beside", None)
    found = None if ask is None else ask(operations.scoped(as_lock_key(key)).name, clock.now() + OPERATION_SECONDS)
    return None if found is None else (found[0], [operations.info(record) for record in found[1]])


def end_session(
    key: LockKey | str, session: int, *, reason: str = "", user: Any = None, backend: str = "default"
) -> bool:
    """Free ``key`` by ending the server process ``session``, and all its other holds with it; see holds_beside().

    For a process that does not answer :func:`force_release` any more. False if that process does not hold it now.
    """
    operations = lock_backends.operations(backend)
    name = operations.scoped(as_lock_key(key)).name
    end = getattr(operations, "end_session", None)
    if end is None or not end(name, session, clock.now() + OPERATION_SECONDS):
        return False
    text = "The session %s that held the lock %s was ended by force (%s)"
    logger.warning(text, session, printable(name), _who_and_why(user, reason))
    return True


def _who_and_why(user: Any, reason: str) -> str:
    return f"user: {printable(str(user))}, reason: {printable(reason) or 'none given'}"


def reap_expired_locks(*, grace: Seconds = 0, backend: str = "default") -> int:
    """Remove what expired holds left behind more than ``grace`` seconds ago; how many holds that were.

    Only tidies up: an expired hold can be taken over without it. Safe to run twice at once and under load.

    Example::

        reap_expired_locks(grace=3600)
    """
    seconds = grace_seconds(grace)
    about_to_ask(backend)
    return reap(backend, seconds, REAP_BATCH)


def reap(backend: str, grace: float, batch_size: int) -> int:
    """The same in batches of ``batch_size``, each a short transaction of its own."""
    operations = lock_backends.operations(backend)
    count = 0
    while removed := operations.reap(grace, batch_size, clock.now() + OPERATION_SECONDS):
        count += removed
        if removed < batch_size:
            break
    signals.tell(signals.locks_reaped, type(operations), backend=backend, count=count)
    return count


def expired_locks(*, grace: Seconds = 0, backend: str = "default") -> Iterator[LockInfo]:
    """What :func:`reap_expired_locks` would remove now."""
    return map(lock_backends.operations(backend).info, expired_records(backend, grace))


def expired_records(backend: str, grace: Seconds = 0) -> Iterator[Record]:
    """The same as the backend gives it."""
    return lock_backends.operations(backend).list_expired(grace_seconds(grace), clock.now() + OPERATION_SECONDS)


def tells(alias: str) -> bool:
    """Whether the backend can tell who holds a lock; one with the least that a backend must have cannot."""
    return lock_backends.operations(alias).inspectable


def about_to_ask(alias: str, seconds: float = OPERATION_SECONDS) -> tuple[BaseLockBackend, float]:
    """The backend, about to be asked what is held, and until when it has to answer."""
    process.check()
    operations = lock_backends.operations(alias)
    deadline = clock.now() + seconds
    finish_all_deferred(operations, deadline)
    return operations, deadline
