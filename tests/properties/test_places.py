"""Every backend against LocalLockBackend: one sequence of operations by several owners, and the answers are equal.

Of exclusive, shared and placed holds. In an episode no hold ends by itself, and no waiter's word: what depends on time
is in the contract suite. To search longer: ANGEE_JOBS_EPISODES=2000.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings

from angee_jobs.locks import LocalLockBackend, clock, lock_backends
from angee_jobs.locks.backends.base import SHARED, WANTED_SECONDS, BaseLockBackend, Extension, Grant, Record, places_of
from angee_jobs.locks.hold import new_owner_id
from tests.support.pg_helpers import sessions_stay, within

#: The aliases of ANGEE_JOBS_LOCKS, and the servers that they need.
ENGINES: dict[str, list[str]] = {
    "sqlite": [],
    "postgres_table": ["postgres"],
    "pgbouncer_table": ["postgres", "pgbouncer"],
    "postgres_advisory": ["postgres"],
    "redis": ["valkey"],
}
EPISODES = int(os.environ.get("ANGEE_JOBS_EPISODES", "40"))
STEPS = 60
TTL = 600.0
KINDS = [0, 0, SHARED, SHARED, 1, 2, 2, 3, 3, 4]


#: What is known to differ; whoever mends it takes it out here.
DIFFER: dict[str, str] = {}


@pytest.fixture(
    params=[
        pytest.param(each, marks=[pytest.mark.xfail(reason=DIFFER[each])] if each in DIFFER else []) for each in ENGINES
    ]
)
def engine(request: pytest.FixtureRequest) -> Iterator[BaseLockBackend]:
    for server in ENGINES[request.param]:
        request.getfixturevalue(server)
    if request.param not in settings.ANGEE_JOBS_LOCKS:
        pytest.skip(f"there is no lock backend {request.param!r}")
    backend = lock_backends.operations(request.param)
    if not backend.most_places:
        pytest.skip("it only excludes")
    with sessions_stay(request.param) if ENGINES[request.param][:1] == ["postgres"] else contextlib.nullcontext():
        yield backend


class Episode:
    """The same operations on the model and on the engine; both keep their own tokens."""

    def __init__(self, engine: BaseLockBackend, seed: int) -> None:
        self.dice = random.Random(seed)
        self.model, self.engine = LocalLockBackend(), engine
        self.names = [f"angee:name:places-{engine.alias}-{os.getpid()}-{seed}-{number}" for number in range(2)]
        self.owners: list[tuple[str, str]] = []  # name and owner of all who ever asked
        self.tokens: dict[str, tuple[int, int]] = {}
        self.highest = dict.fromkeys(self.names, 0)
        self.began = clock.now()
        self.trail: list[str] = []

    def both(
        self, what: str, call: Callable[[BaseLockBackend], Any], read: Callable[[Any], Any] = lambda it: it
    ) -> Any:
        expected, got = call(self.model), call(self.engine)
        self.trail.append(f"{what} -> {read(expected)!r}")
        assert read(got) == read(expected), "\n".join([*self.trail, f"but got {read(got)!r}"])
        return expected, got

    def granted(self, owner: str, grants: tuple[Grant | None, Grant | None], name: str) -> None:
        expected, got = grants
        if expected is not None and got is not None and got.fencing_token is not None:
            assert expected.fencing_token is not None
            if owner not in self.tokens or got.fencing_token != self.tokens[owner][1]:
                assert got.fencing_token > self.highest[name], self.trail
            self.highest[name] = max(self.highest[name], got.fencing_token)
            self.tokens[owner] = expected.fencing_token, got.fencing_token

    def some(self) -> tuple[str, str]:
        return self.dice.choice(self.owners[-12:]) if self.owners else (self.names[0], new_owner_id())

    # The operations.

    def acquire(self) -> None:
        name, places = self.dice.choice(self.names), self.dice.choice(KINDS)
        owner = new_owner_id(places)
        self.owners.append((name, owner))
        how = self.dice.choice(["acquire", "acquire", "acquire_next"])

        def call(backend: BaseLockBackend) -> Grant | None:
            return getattr(backend, how)(name, owner, TTL, owner, within())  # type: ignore[no-any-return]

        grants = self.both(f"{how} {name[-1]} {_short(owner)}", call, _place)
        self.granted(owner, grants, name)

    def release(self) -> None:
        name, owner = self.some()
        self.both(f"release {_short(owner)}", lambda backend: backend.release(name, owner, within()))

    def extend(self) -> None:
        batch = [Extension(name, owner, TTL) for name, owner in {self.some() for _ in range(4)}]
        self.both("extend", lambda backend: sorted(map(_short, backend.extend(batch, within()))))

    def adopt(self) -> None:
        if not self.engine.leases:
            return
        name, owner = self.some()
        new = new_owner_id(places_of(owner))
        self.owners.append((name, new))
        if owner in self.tokens:
            self.tokens[new] = self.tokens[owner]

        def call(backend: BaseLockBackend) -> Grant | None:
            return backend.adopt(name, owner, new, TTL, new, within())

        grants = self.both(f"adopt {_short(owner)} as {_short(new)}", call, _place)
        self.granted(new, grants, name)

    def wait(self) -> None:
        """As waiters do: the exclusive ones leave word. On session locks only a try tells, and words come later."""
        if not self.engine.leases:
            return
        name, places = self.dice.choice(self.names), self.dice.choice(KINDS[1:])
        self.both(
            f"remaining {name[-1]} {places}",
            lambda backend: backend.remaining(name, within(), places),
            lambda left: left is None,
        )

    def force(self) -> None:
        name, owner = self.some()
        self._force(name, owner)
        if not self.model.inspect_many([name], within()):
            # Whether that ends a word is for the engine to say; an exclusive hold ends it everywhere.
            alone = new_owner_id()
            self.both("enter alone", lambda each: each.acquire(name, alone, TTL, alone, within()), _place)
            self.both("leave", lambda each: each.release(name, alone, within()))

    def _force(self, name: str, owner: str) -> None:
        if self.dice.random() < 0.3 or owner not in self.tokens:
            self.both(f"force {name[-1]}", lambda each: each.force_release(name, within()), lambda it: it is None)
            return
        mine = dict(zip((self.model, self.engine), self.tokens[owner], strict=True))
        self.both(
            f"force {_short(owner)}",
            lambda backend: backend.force_release(name, within(), mine[backend]),
            lambda record: record and _seen(record),
        )

    def look(self) -> None:
        self.both(
            "look", lambda backend: sorted(map(_seen, backend.inspect_many(self.names, within()))), lambda seen: seen
        )
        for name in self.names:
            self.both("inspect", lambda backend, name=name: backend.inspect(name, within()), lambda it: it is None)
            self.both(
                "list",
                lambda backend, name=name: sorted(_seen(it) for it in backend.list_held(within()) if it.name == name),
            )

    def run(self) -> None:
        most = {self.acquire: 8, self.release: 5, self.extend: 1, self.adopt: 1, self.wait: 2, self.force: 1}
        if self.engine.leases:
            most[self.look] = 1
        for step in self.dice.choices(list(most), list(most.values()), k=STEPS):
            if clock.now() - self.began > WANTED_SECONDS / 2:
                break  # a slow machine: a word might end
            step()
        if self.engine.leases:
            self.look()
        for name, owner in self.owners:
            self.both("end", lambda backend, name=name, owner=owner: backend.release(name, owner, within()))
        assert self.engine.inspect_many(self.names, within()) == []


def _short(owner: str) -> str:
    return owner[:4] + owner[32:]


def _place(grant: Grant | None) -> tuple[bool, int | None]:
    return grant is not None, grant and grant.place


def _seen(record: Record) -> tuple[str, int, str]:
    return record.name[-1], -1 if record.place is None else record.place, _short(record.holder or "")


def test_the_same_answers_as_the_model(engine: BaseLockBackend) -> None:
    for seed in range(EPISODES):
        Episode(engine, seed).run()
