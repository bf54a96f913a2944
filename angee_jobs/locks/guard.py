"""``guard()``: a stale holder's transaction cannot commit after a newer holder's.

A lock can be lost without its holder knowing, and the write that was on its way then comes late. The database that is
written to can refuse it: in the caller's own transaction, the guard row of the key takes the hold's fencing token,
unless it has a higher one already. The row stays locked until that transaction ends, so guarded transactions of one
key pass one after the other, in the order of their tokens or not at all.

Written with the ORM, since it has to work on whatever database the caller writes to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, connections, transaction
from django.db.models.functions import Now

from .backends.postgres.missing import remedy
from .errors import LockBackendError, LockLostError
from .hold import Hold
from .keys import name_digest
from .log import logger

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: How long a guard waits for a guarded transaction before it, in seconds.
GUARD_SECONDS = 10.0


@contextlib.contextmanager
def guard(checked_hold: Callable[[], Hold], using: str, timeout: float) -> Iterator[None]:
    """See :meth:`Lock.guard`. ``checked_hold`` tells the caller's hold, or raises LockLostError."""
    connection = connections[using]
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError(
            f"guard() protects a transaction: enter transaction.atomic(using={using!r}) first"
        )
    hold = checked_hold()
    name, token = hold.name, hold.fencing_token
    if token is None:
        raise LockBackendError(f"The backend of {name} gives no fencing tokens, which guard() needs", name=name)
    try:
        # The limit is set past Django's cursor, whose errors are the driver's own.
        with connection.wrap_database_errors, _bounded_wait(connection, timeout):
            passed = _pass(using, name, token)
    except DatabaseError as error:
        _raise_clearly(connection, error, name, using, timeout)
    if not passed:
        transaction.set_rollback(True, using=using)  # also if the caller swallows the error
        raise LockLostError(f"A newer holder of {name} has already passed the guard on {using!r}", name=name)
    yield
    try:
        hold.check()
    except LockLostError:
        transaction.set_rollback(True, using=using)
        raise


def prune_guards(age: timedelta, *, dry_run: bool = False) -> int:
    """Remove the guard rows of all databases that no transaction has passed for ``age``; how many those were.

    A stale holder that comes later than that is not stopped any more.
    """
    from ..models import LockGuard

    count = 0
    for using in connections:
        old = LockGuard.objects.using(using).filter(passed_at__lt=Now() - age)
        try:
            # Asked first: a replica has the table too, but there is nothing to be removed there.
            if found := old.count():
                count += found if dry_run else old.delete()[0]
        except DatabaseError as error:  # down, or not a database that this app's tables are in
            logger.info("The guard rows of the database %r were left alone: %s", using, error)
    return count


def _pass(using: str, name: str, token: int) -> bool:
    from ..models import LockGuard

    rows = LockGuard.objects.using(using)
    mine = rows.filter(pk=name_digest(name), fencing_token__lte=token)
    if mine.update(fencing_token=token, passed_at=Now()):
        return True
    new = LockGuard(pk=name_digest(name), name=name, fencing_token=token, passed_at=Now())
    rows.bulk_create([new], ignore_conflicts=True)
    # Tells an insert of ours from a row that was there; locks the latter, and looks at it as it is then.
    return bool(mine.update(fencing_token=token, passed_at=Now()))


@contextlib.contextmanager
def _bounded_wait(connection: BaseDatabaseWrapper, timeout: float) -> Iterator[None]:
    """Let statements of the caller's connection wait at most ``timeout`` seconds for a lock, and put that back."""
    settings: dict[str, tuple[str, str, int]] = {
        # vendor: how to read the present limit, how to set one, and how many of its units a second has
        "postgresql": (
            "SELECT current_setting('lock_timeout')",
            "SELECT set_config('lock_timeout', %s, true)",
            1000,
        ),
        "sqlite": ("PRAGMA busy_timeout", "PRAGMA busy_timeout = %s", 1000),
        "mysql": ("SELECT @@innodb_lock_wait_timeout", "SET innodb_lock_wait_timeout = %s", 1),
    }
    if connection.vendor not in settings:
        yield
        return
    read, write, units = settings[connection.vendor]

    def put(value: Any) -> None:
        if connection.vendor == "sqlite":  # a pragma takes no parameters
            cursor.execute(write % int(value))
        else:
            cursor.execute(write, [value])

    connection.ensure_connection()
    raw: Any = connection.connection
    # The driver's cursor: Django's refuses every statement once one has failed, and the limit has to be put back.
    with contextlib.closing(raw.cursor()) as cursor:
        cursor.execute(read)
        before = cursor.fetchone()[0]
        limit = max(1, round(min(timeout * units, 2**30)))  # as long as any of them can wait
        put(str(limit) if connection.vendor == "postgresql" else limit)
        try:
            yield
        finally:
            # In a failed transaction of PostgreSQL nothing can be set, nor need it be: the rollback does it.
            if not (connection.vendor == "postgresql" and raw.info.transaction_status.name != "INTRANS"):
                put(before)


def _raise_clearly(
    connection: BaseDatabaseWrapper, error: DatabaseError, name: str, using: str, timeout: float
) -> None:
    """Say what the guard's own failures mean. All else, such as a serialization failure, is the caller's as it is."""
    cause: Any = error.__cause__
    waited_too_long = (
        getattr(cause, "sqlstate", None) == "55P03"
        or getattr(cause, "sqlite_errorcode", None) == 5  # SQLITE_BUSY, not SQLITE_BUSY_SNAPSHOT
        or (connection.vendor == "mysql" and error.args[:1] == (1205,))
    )
    if waited_too_long:
        raise LockBackendError(
            f"The guard of {name} on {using!r} waited {timeout:g} s for another transaction that has not ended",
            name=name,
        ) from error
    missing = getattr(cause, "sqlstate", None) == "42P01" or "no such table" in str(error)
    if missing:
        raise LockBackendError(f"The guard table is missing on {using!r}: {remedy(using)}", name=name) from error
    raise error
