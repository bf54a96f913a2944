"""What the contract suite must know about a backend, and how it makes the backend's storage fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NoReturn

from ...backends.base import OPERATION_SECONDS
from ...clock import now
from ...conf import lock_backends
from ...keys import LockKey

#: What a strategy may name in ``lacks``. The first seven are properties of the backend. Each of the others is a hook of
#: the strategy, with that name.
CAPABILITIES = {
    "verbs": "the operations of BaseLockBackend, and so the waiting and watching of this package",
    "processes": "exclusion between processes",
    "leases": "holds that end by themselves and are renewed",
    "fencing": "fencing tokens",
    "listing": "inspect, list_held and force_release",
    "places": "several holders of a key at once: slots= and shared=True",
    "push": "waiters that hear of a release in another process",
    "delete_hold": "a hold that is deleted at the storage, without its holder being told",
    "empty": "a storage that is emptied",
    "hanging": "a storage that does not answer",
    "unreachable": "a storage that cannot be reached",
    "break_connections": "connections that the server ends",
}


class Strategy:
    """Says how to test one backend: its alias, what it lacks, and hooks that make its server fail.

    If a backend cannot have a hook, name that in ``lacks`` with the reason. The tests that need it are skipped, for
    that reason. If a hook is neither written nor named there, the tests that need it fail.

    Example::

        class MyStrategy(Strategy):
            alias = "mine"
            lacks = {
                "hanging": "there is no server",
                "unreachable": "there is no server",
                "break_connections": "there is no server",
            }

            def empty(self):
                MyStorage.clear()
    """

    #: The backend under test: an alias in ``ANGEE_JOBS_LOCKS``.
    alias: str = "default"
    #: What the backend cannot do, and why. See :data:`CAPABILITIES`.
    lacks: Mapping[str, str] = {}
    #: Aliases in ``DATABASES`` on which the tests of transactions and of ``guard()`` run. They need this app's tables.
    databases: ClassVar[Sequence[str]] = ("default",)

    def set_up(self) -> None:
        """Called before each test."""

    def tear_down(self) -> None:
        """Called after each test, when everything that the test opened is closed."""

    def leftovers(self) -> Sequence[str]:
        """What the test left at the storage: open transactions, sessions with locks, and so on.

        One line each, for the message of the failure. Leave out holds: the suite lists them itself.
        """
        return ()

    def delete_hold(self, key: LockKey) -> None:
        """Remove the live hold of ``key`` at the storage, without its holder being told."""
        backend = lock_backends.operations(self.alias)
        if backend.force_release(key.name, now() + OPERATION_SECONDS) is None:
            raise AssertionError(f"There is no hold of {key.name} to delete")

    def empty(self) -> None:
        """Remove everything that the backend has stored, as TRUNCATE or FLUSHALL does."""
        self._missing("empty")

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Inside the block, the storage does not answer. Afterwards it answers again, as if it had only been slow."""
        self._missing("hanging")
        yield

    @contextlib.contextmanager
    def unreachable(self) -> Iterator[None]:
        """Inside the block, every request fails. Afterwards, new requests succeed."""
        self._missing("unreachable")
        yield

    def break_connections(self) -> None:
        """Let the server end every connection of the backend."""
        self._missing("break_connections")

    def _missing(self, hook: str) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} has no {hook}(), which gives {CAPABILITIES[hook]}. "
            f"Write it, or say in {type(self).__name__}.lacks why it cannot be."
        )
