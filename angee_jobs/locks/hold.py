"""One hold and its state, from the request that may win it to its end.

A hold is kept apart from the :class:`Lock` that asked for it: the lock can be dropped or used again while the hold is
still being released, and the background thread must be able to know a hold without keeping its lock alive.
"""

from __future__ import annotations

import enum
import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any

from . import clock, process
from .backends.base import ALONE, SHARED, BaseLockBackend, places_of, to_datetime
from .errors import lost_error
from .holder import describe_holder
from .keys import LockKey


class State(enum.Enum):
    REQUESTED = "requested"
    HELD = "held"
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


def new_owner_id(places: int = ALONE) -> OwnerId:
    """A new secret, for a hold that shares its key so (``places_of()`` reads that)."""
    secret = os.urandom(16).hex()  # as secrets.token_hex does it, in half the time
    return OwnerId(secret if places == ALONE else f"{secret}~{'shared' if places == SHARED else places}")


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
        "place",
        "places",
        "renew_at",
        "renews",
        "started",
        "ttl",
    )

    def __init__(self, key: LockKey, backend: BaseLockBackend, ttl: float, places: int = ALONE) -> None:
        self.key = key
        self.name = key.name
        self.backend = backend
        self.ttl = ttl
        #: Who else may hold the key meanwhile: ALONE, SHARED, or a number of places.
        self.places = places
        self.owner = new_owner_id(places)
        #: Which of the places it has, from 0.
        self.place: int | None = None
        self.generation = process.generation
        self.fencing_token: int | None = None
        #: When it was granted, and when the lease would have ended then, by the backend's clock.
        self.granted: float | None = None
        self.granted_expiry: float | None = None
        #: All on the local clock: when the winning request was sent, when the lease surely ends (0 before it is
        #: granted), when it is to be renewed next (or looked at, for a session lock), and when it must end anyway.
        self.started = self.deadline = 0.0
        self.renew_at = self.latest_end = math.inf
        self.renews = False
        #: Until when the lock stays taken although its holder is done; on the local clock.
        self.keep_until = 0.0
        #: Tells when the lock object that has this hold is dropped.
        self.handle: object = None
        self.on_lost: Callable[[], object] | None = None
        #: An operation for this hold that its caller, who was cancelled, does not wait for any more.
        self.in_flight: Future[Any] | None = None
        self._end: dict[str, list[State]] = {}

    def share_as(self, places: int) -> None:
        """Share the key as ``places`` says: of a hold that is still to be asked for."""
        if places != self.places:
            self.places, self.owner = places, new_owner_id(places)

    def of(self, owner: OwnerId) -> Hold:
        """The same hold under another owner id, so that it can be released."""
        other = Hold(self.key, self.backend, self.ttl, places_of(owner))
        other.owner = owner
        return other

    @property
    def state(self) -> State:
        if self._end:
            return self._end["end"][0]
        return State.HELD if self.deadline else State.REQUESTED

    def end(self, state: State) -> bool:
        """End it here; True for the one caller that did.

        The claim is one dict operation, so that no thread, signal handler or finalizer can come in between, and
        none ever waits for another.
        """
        mine = [state]
        if self._end.setdefault("end", mine) is not mine:
            return False
        self.handle = None
        return True

    def found_lost(self) -> None:
        """The storage knew nothing of a hold that was being released: it had been lost before."""
        self._end["end"][0] = State.LOST

    @property
    def ended(self) -> bool:
        return bool(self._end)

    @property
    def foreign(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self.generation != process.generation

    @property
    def over(self) -> bool:
        """Whether the local clock says that it has ended, told or not."""
        now = clock.now()
        return now >= self.deadline or now >= self.latest_end

    @property
    def live(self) -> bool:
        """Whether this process holds the lock by it, as far as it can know without asking."""
        return bool(self.deadline) and not self._end and not self.foreign and not self.over

    def check(self) -> None:
        """LockLostError unless it is live."""
        if not self.live:
            raise lost_error(self.name)

    def next_ttl(self) -> float:
        """For how long to extend the lease now: never beyond the moment when it must end."""
        return self.ttl if self.latest_end == math.inf else min(self.ttl, max(self.latest_end - clock.now(), 0.001))

    def extended(self, sent: float, ttl: float) -> None:
        """An extension that was sent at ``sent`` was granted. Extensions never shorten, here as at the storage."""
        if self.backend.leases:
            self.deadline = max(self.deadline, sent + ttl)

    def release_at_backend(self, deadline: float) -> bool:
        """Free the lock, or leave it to nobody for as long as it is to be kept; False if the hold was gone."""
        left = self.keep_until - clock.now() if self.keep_until else 0.0
        if left <= 0:
            return self.backend.release(self.name, self.owner, deadline)
        # Nobody knows the owner id that it gets.
        holder = describe_holder("", left, self.places)
        return self.backend.adopt(self.name, self.owner, new_owner_id(self.places), left, holder, deadline) is not None

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
        return f"<Hold {self.name} {self.state.value} token={self.fencing_token}>"
