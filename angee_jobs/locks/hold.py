"""One hold, from its grant to its end.

A hold is kept apart from the :class:`Lock` that made it: the lock can be dropped or used again while the hold is
still being given up, and the renewal thread must be able to know a hold without keeping its lock alive.
"""

from __future__ import annotations

import enum
import hashlib
import math
import os
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from . import clock, process
from .backends.base import BaseLockBackend, Grant, to_datetime
from .holder import describe_holder

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from .keys import LockKey
    from .renewal import Dropped
    from .waiting import WaitingRoom

#: How often a session lock's connection is looked at, in seconds: its loss must be told within two.
SESSION_WATCH_SECONDS = 1.0


class End(enum.Enum):
    RELEASED = "released"
    LOST = "lost"
    DETACHED = "detached"


class OwnerId(str):
    """The secret of one hold. Its ``repr`` hides it, so that a traceback's variables on a debug page do not tell it."""

    __slots__ = ("_digest",)
    _digest: str

    @property
    def digest(self) -> str:
        """:func:`owner_digest`, which most backends need twice, at the acquire and at the release."""
        try:
            return self._digest
        except AttributeError:
            self._digest = hashlib.sha256(self.encode()).hexdigest()  # here, so that no frame has the plain text
            return self._digest

    def __repr__(self) -> str:
        return "'***'"


def new_owner_id() -> OwnerId:
    return OwnerId(os.urandom(16).hex())  # as secrets.token_hex does it, in half the time


class Hold:
    """The state of one hold. Made before the request that may win it, so that its owner id is known if that fails."""

    __slots__ = (
        "__weakref__",
        "_end",
        "backend",
        "deadline",
        "fencing_token",
        "generation",
        "granted",
        "granted_expiry",
        "handle",
        "in_flight",
        "keep_until",
        "key",
        "latest_end",
        "name",
        "on_lost",
        "owner",
        "renew_at",
        "renews",
        "room",
        "started",
        "ttl",
    )

    def __init__(self, key: LockKey, name: str, backend: BaseLockBackend, room: WaitingRoom, ttl: float) -> None:
        self.key = key
        self.name = name
        self.backend = backend
        self.room = room
        self.ttl = ttl
        self.owner = new_owner_id()
        self.generation = process.generation
        self.fencing_token: int | None = None
        #: When it was granted, and when the lease would have ended then, by the backend's clock.
        self.granted: float | None = None
        self.granted_expiry: float | None = None
        #: All on the local clock: when the winning request was sent, when the lease surely ends, when it is to be
        #: renewed next (or looked at, for a session lock), and when it must end whatever happens.
        self.started = self.deadline = 0.0
        self.renew_at = self.latest_end = math.inf
        self.renews = False
        #: Until when the lock stays taken although its holder is done; on the local clock.
        self.keep_until = 0.0
        #: Tells when the lock object that has this hold is dropped.
        self.handle: Dropped | None = None
        self.on_lost: Callable[[], None] | None = None
        #: A verb for this hold that nobody waits for any more, because its caller was cancelled.
        self.in_flight: Future[Any] | None = None
        self._end: dict[str, list[End]] = {}

    def of(self, owner: OwnerId) -> Hold:
        """The same hold under another owner id, so that it can be given up."""
        other = Hold(self.key, self.name, self.backend, self.room, self.ttl)
        other.owner = owner
        return other

    def grant(self, grant: Grant, *, renews: bool) -> None:
        """The request that was sent at ``started`` won."""
        self.fencing_token = grant.fencing_token
        self.granted = grant.acquired_at
        self.granted_expiry = grant.expires_at
        sent = self.started
        if self.backend.leases:
            self.deadline = sent + self.ttl
            self.renews = renews
            self.renew_at = sent + self.ttl / 3 if renews else math.inf
        else:
            self.deadline = math.inf
            self.renews = True  # is looked at, whether or not its block renews
            self.renew_at = sent + SESSION_WATCH_SECONDS

    def next_ttl(self) -> float:
        """For how long to extend the lease now: never beyond the moment when it must end."""
        return self.ttl if self.latest_end == math.inf else min(self.ttl, max(self.latest_end - clock.now(), 0.001))

    def extended(self, sent: float, ttl: float) -> None:
        """An extension that was sent at ``sent`` was granted. Extensions never shorten, here as at the storage."""
        if self.backend.leases:
            self.deadline = max(self.deadline, sent + ttl)

    @property
    def due(self) -> float:
        """When the renewal thread has to look at this hold next."""
        return min(self.renew_at, self.deadline, self.latest_end)

    def end(self, how: End) -> bool:
        """End it here; True for the one caller that did.

        The claim is one dict operation, so that no thread, signal handler or finalizer can come in between, and
        none ever waits for another.
        """
        mine = [how]
        if self._end.setdefault("end", mine) is not mine:
            return False
        self.handle = None
        return True

    def found_lost(self) -> None:
        """The storage knew nothing of a hold that was being released: it had been lost before."""
        self._end["end"][0] = End.LOST

    @property
    def ended(self) -> End | None:
        end = self._end.get("end")
        return end[0] if end else None

    @property
    def foreign(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self.generation != process.generation

    @property
    def over(self) -> bool:
        """Whether the local clock says that it has ended, told or not."""
        now = clock.now()
        return now >= self.deadline or now >= self.latest_end

    def give_up(self, deadline: float) -> bool:
        """Free the lock at the storage, or leave it to nobody for as long as it is to be held; False if it was gone."""
        left = self.keep_until - clock.now() if self.keep_until else 0.0
        if left <= 0:
            return self.backend.release(self.name, self.owner, deadline)
        # The owner id that it gets is known to none.
        holder = describe_holder("", left)
        return self.backend.adopt(self.name, self.owner, new_owner_id(), left, holder, deadline) is not None

    @property
    def acquired_at(self) -> datetime | None:
        return to_datetime(self.granted)

    @property
    def expires_at(self) -> datetime | None:
        """The end of the lease by the backend's clock, as near as this process can know without asking."""
        if self.granted_expiry is None or not self.backend.leases:
            return None
        at = to_datetime(self.granted_expiry)
        assert at is not None
        return at + timedelta(seconds=self.deadline - self.started - self.ttl)

    def __repr__(self) -> str:  # without the owner id
        state: Any = self.ended.value if self.ended else "held"
        return f"<Hold {self.name} {state} token={self.fencing_token}>"
