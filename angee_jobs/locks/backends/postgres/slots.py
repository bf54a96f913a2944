"""The places of sessions in a pool, and the right to use one.

A request claims a slot, and a claim is void when the frame that made it is gone, whatever ended the frame: an
exception of a signal handler can strike between any two instructions, also in the code that cleans up.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING

from ... import clock, process
from .errors import NoAnswer, SessionLost

if TYPE_CHECKING:
    from .pool import Pool
    from .session import Session


class Slot:
    """The place of one session in a pool."""

    __slots__ = ("claims", "session", "used_at")

    def __init__(self) -> None:
        self.session: Session | None = None
        self.claims: dict[str, weakref.ref[Claim]] = {}
        self.used_at = 0.0

    @property
    def claim(self) -> Claim | None:
        """The present one."""
        by = self.claims.get("by")
        return None if by is None else by()

    @property
    def claimed(self) -> bool:
        return self.claim is not None

    @property
    def claimed_here(self) -> bool:
        """Whether we are a signal handler that has interrupted a request of this very thread."""
        claim = self.claim
        return claim is not None and claim.thread == threading.get_ident()

    def answered(self) -> bool:
        """Read what has come of the answer that is due; False if that is not all of it."""
        try:
            if self.session is not None:
                self.session.drain(-math.inf)
        except NoAnswer:
            return False
        except SessionLost:
            self.drop()
        return True

    def drop(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()


class Claim:
    """The right to use a slot. One dict operation takes it; only its owner, while there is one, gives it back."""

    __slots__ = ("__weakref__", "_key", "pool", "slot", "thread")

    def __init__(self, pool: Pool, slot: Slot) -> None:
        self.pool = pool
        self.slot = slot
        self.thread = threading.get_ident()
        self._key = weakref.ref(self)

    def take(self) -> bool:
        slot = self.slot
        by = slot.claims.setdefault("by", self._key)
        if by is not self._key and by() is None:
            with _voiding:
                if slot.claims.get("by") is by:
                    slot.claims.pop("by", None)
            by = slot.claims.setdefault("by", self._key)
        return by is self._key

    def give_back(self, *, quietly: bool = False) -> None:
        """``quietly``: the slot was not used, and a thread that waits for one need not look."""
        slot = self.slot
        if slot.claims.get("by") is self._key:
            if not quietly:
                slot.used_at = clock.now()
            slot.claims.pop("by", None)
            if self.pool.waiters and not quietly:
                self.pool.waker.put(None)


#: Held by the thread that removes a void claim; re-entrant for signal handlers.
_voiding = threading.RLock()


def _after_fork() -> None:
    global _voiding
    _voiding = threading.RLock()


process.on_fork(in_child=_after_fork)
