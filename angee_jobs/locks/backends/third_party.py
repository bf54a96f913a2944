"""Backends of other people that have no more than ``try_acquire`` and ``is_held``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

from ..errors import LockBackendError, LockError
from ..keys import LockKey, as_lock_key
from ..types import LONGEST, LockHandle
from .base import BaseLockBackend, Extension, Grant, Record


class HandleBackend(BaseLockBackend):
    """Gives such a backend the operations that the policy needs, as far as they go.

    It waits by itself, and its holds are neither renewed nor watched: what ends them is its own affair.
    """

    leases = False
    push = None
    inspectable = False

    def __init__(self, inner: Any, alias: str) -> None:
        self.inner = inner
        self.alias = alias
        self.cross_process = bool(getattr(inner, "cross_process", False))
        self._handles: dict[str, LockHandle] = {}

    def acquire_within(self, key: LockKey, owner: str, timeout: float | None) -> Grant | None:
        """The whole wait in one call, since only the inner backend knows how to wait for its locks."""
        with self._errors(key.name):
            if timeout is None:
                handle = self.inner.try_acquire(key)
            else:
                longest = timedelta.max if timeout > LONGEST else timedelta(seconds=timeout)
                handle = self.inner.try_acquire(key, timeout=longest)
        if not handle:
            return None
        self._handles[owner] = handle
        return Grant(fencing_token=None)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        return [extension.owner for extension in extensions if extension.owner in self._handles]

    def release(self, name: str, owner: str, deadline: float) -> bool:
        handle = self._handles.get(owner)
        if handle is None:
            return False
        with self._errors(name):
            # Only a plain False says "lost": the protocol promises no result, and most handles return None.
            released = handle.release() is not False
        self._handles.pop(owner, None)
        return released

    def inspect(self, name: str, deadline: float) -> Record | None:
        raise self._untold()

    def list_held(self, deadline: float) -> Iterator[Record]:
        raise self._untold()

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        raise self._untold()

    def is_held(self, key: LockKey | str) -> bool:
        key = as_lock_key(key)  # what try_acquire() gets, so that both mean one lock
        with self._errors(key.name):
            return bool(self.inner.is_held(key))

    def _untold(self) -> LockBackendError:
        return LockBackendError(f"The lock backend {self.alias!r} does not tell who holds a lock")

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """An exception inside is the backend's fault, and not an answer."""
        try:
            yield
        except LockError:
            raise
        except Exception as error:
            raise LockBackendError(f"The lock backend {self.alias!r} failed: {error!r}", name=name) from error
