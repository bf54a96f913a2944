"""The model of the model-based tests: who holds what, and who believes what."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from angee_jobs.locks import LockKey

#: Whose a hold is that was detached.
DETACHED = "detached"


class Belief(enum.Enum):
    """What a client can know of its hold."""

    NOTHING = "it has none, or has given it up"
    HOLDS = "it has one"
    STALE = "the storage has ended it, and the client may not have been told yet"
    LOST = "it was told that the storage has ended it"


@dataclass
class Held:
    """The hold of a key as the storage has it."""

    token: int
    by: str
    #: Of one that was detached.
    owner_id: str = ""


@dataclass
class Model:
    """All that there is to know about locks."""

    holds: dict[LockKey, Held] = field(default_factory=dict)
    #: Keys with the remains of an expired hold.
    remains: set[LockKey] = field(default_factory=set)
    tokens: dict[LockKey, int] = field(default_factory=dict)
    beliefs: dict[tuple[str, LockKey], Belief] = field(default_factory=dict)

    def belief(self, client: str, key: LockKey) -> Belief:
        return self.beliefs.get((client, key), Belief.NOTHING)

    def is_holder(self, client: str, key: LockKey) -> bool:
        return key in self.holds and self.holds[key].by == client

    def grant(self, client: str, key: LockKey, token: int | None) -> None:
        assert key not in self.holds, f"{client} was granted {key}, which {self.holds[key].by} has"
        assert token is not None and token > self.tokens.get(key, 0), "fencing tokens rise"
        self.tokens[key] = token
        self.holds[key] = Held(token, client)
        self.remains.discard(key)
        self.beliefs[client, key] = Belief.HOLDS

    def end(self, key: LockKey, belief: Belief = Belief.NOTHING) -> None:
        """The hold of ``key`` is over; what its client believes now."""
        ended = self.holds.pop(key)
        if ended.by != DETACHED:
            self.beliefs[ended.by, key] = belief
