"""What can go wrong with a session, and what the server's errors mean for a lock."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

from ...errors import LockBackendError


class SessionLost(Exception):
    """The connection is dead; ``sent``: the request may have been carried out before it died."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class NoAnswer(Exception):
    """The deadline came first; ``sent``: the request may have been, or may yet be, carried out."""

    def __init__(self, message: str = "no answer in time", *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class CannotConnect(LockBackendError):
    """There was no session, and none could be opened."""


class RowLocked(LockBackendError):
    """Another transaction locked the row for longer than the request could wait. Nothing was done.

    In a batch of extensions: but for the owners in ``extended``.
    """

    extended: Collection[str] = ()


def explain(error: Any, alias: str) -> NoReturn:
    """Raise LockBackendError for what the server said."""
    state = error.sqlstate or ""
    if state == "55P03":
        raise RowLocked(f"A transaction on the database {alias!r} keeps the lock's row locked: {error}") from error
    if state in ("42P01", "42703", "3F000"):
        from .missing import remedy

        raise LockBackendError(
            f"The lock tables are missing on the database {alias!r} ({error}): {remedy(alias)}"
        ) from error
    if state == "25006":
        raise LockBackendError(
            f"The database {alias!r} is read-only, and locks have to be written: use an alias of the primary server "
            f"({error})"
        ) from error
    raise LockBackendError(f"The database {alias!r} refused a request of its locks: {error}") from error


def refused(error: LockBackendError) -> bool:
    """Whether the server answered, with an error."""
    return getattr(error.__cause__, "sqlstate", None) is not None


def driver_error(error: Exception) -> BaseException:
    """psycopg's own error, for ``__cause__``."""
    from psycopg import OperationalError

    return error.__cause__ or OperationalError(str(error))


def driver_errors() -> Any:
    from psycopg import Error

    return Error


def operational_error() -> Any:
    from psycopg import OperationalError

    return OperationalError
