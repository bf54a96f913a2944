"""The errors of a lock, one class per thing that a caller can do about it.

Refused and broken are kept apart on purpose: "somebody else holds it" is an answer that a task may act on by
skipping, "nobody could tell" is a fault that has to reach whoever runs the system.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from .types import LockInfo


class LockError(Exception):
    """Base of everything that this package raises about a lock.

    ``name`` is the canonical name of the lock, or None where no single lock is concerned.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class LockNotAcquiredError(LockError):
    """Somebody else holds the lock, and still did when the time to wait was over.

    ``holder`` is the :class:`~angee_jobs.locks.LockInfo` of whoever held it when that was looked up just after
    the refusal, or None: the holder may have gone in between, and some storages cannot tell.

    Example::

        try:
            with lock("billing-run", timeout=5):
                ...
        except LockNotAcquiredError as refused:
            logger.info("billing is busy: %s", refused.holder)
    """

    def __init__(self, message: str, *, name: str | None = None, holder: LockInfo | None = None) -> None:
        super().__init__(message, name=name)
        self.holder = holder


class LockLostError(LockError):
    """The hold ended before its holder released it: somebody else may be in the protected section now.

    Raised by :meth:`Lock.check`, :meth:`Lock.guard` and :meth:`Lock.detach`, by :func:`attach_lock` if there is nothing
    to attach any more, and on leaving a block whose body did not raise.
    """


class LockBackendError(LockError):
    """The storage of the locks could not be reached or used, or did not answer in time.

    Says nothing about who holds the lock. The driver's own error, where there was one, is ``__cause__``.
    ``uncertain`` is True if the request may have been carried out all the same: it was sent, but not answered.
    """

    def __init__(self, message: str, *, name: str | None = None, uncertain: bool = False) -> None:
        super().__init__(message, name=name)
        self.uncertain = uncertain
        #: The owner ids that were extended all the same, where one lease of a batch could not be.
        self.extended: Collection[str] = ()


def add_note(error: BaseException, text: str) -> None:
    """Add a note to the exception of a body, which may be of a class that takes none: then it goes without."""
    with contextlib.suppress(Exception):
        error.add_note(text)


def lost_error(name: str) -> LockLostError:
    return LockLostError(f"The lock {name} was lost before it was released (expired, or released by force)", name=name)
