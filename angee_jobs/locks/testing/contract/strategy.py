"""What the contract suite has to know about a backend, and how it makes that backend's storage misbehave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NoReturn

from ...backends.base import VERB_SECONDS
from ...clock import now
from ...conf import lock_backends
from ...keys import LockKey

#: What a strategy may say that it lacks. The first ones are properties of the backend; each of the others is the hook
#: of that name.
CAPABILITIES = {
    "verbs": "the verbs of BaseLockBackend, and so the waiting and watching of this package",
    "processes": "exclusion between processes",
    "leases": "holds that end by themselves and are renewed",
    "fencing": "fencing tokens",
    "listing": "inspect, list_held and force_release",
    "push": "waiters that hear of a release in another process",
    "delete_hold": "a hold deleted at the storage, behind the back of everybody",
    "empty": "a storage that is emptied",
    "hanging": "a storage that does not answer",
    "unreachable": "a storage that cannot be reached",
    "break_connections": "connections that the server ends",
}


class Strategy:
    """How to test one backend: its alias, what it lacks, and the hooks of its server.

    A hook that a backend cannot have is named in ``lacks`` with the reason, and the tests that need it are skipped for
    that reason. One that is neither written nor named there fails its tests.

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
    #: Capabilities that the backend does not have, and why. See :data:`CAPABILITIES`.
    lacks: Mapping[str, str] = {}
    #: Aliases in ``DATABASES`` on which the tests of transactions and of ``guard()`` run. They need this app's tables.
    databases: ClassVar[Sequence[str]] = ("default",)

    def set_up(self) -> None:
        """Before each test."""

    def tear_down(self) -> None:
        """After each test, and after everything that it had opened was closed."""

    def leftovers(self) -> Sequence[str]:
        """What is left at the storage although no test uses it: open transactions, sessions with locks, and so on.

        One line each, for the message of the failure. Holds need not be listed here.
        """
        return ()

    def delete_hold(self, key: LockKey) -> None:
        """Remove the live hold of ``key`` at the storage, so that nobody is told."""
        backend = lock_backends.verbs(self.alias)
        if backend.force_release(key.name, now() + VERB_SECONDS) is None:
            raise AssertionError(f"There is no hold of {key.name} to delete")

    def empty(self) -> None:
        """Remove all that the backend has stored, as TRUNCATE or FLUSHALL would."""
        self._missing("empty")

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Inside the block the storage gives no answer; afterwards it goes on as if nothing had happened."""
        self._missing("hanging")
        yield

    @contextlib.contextmanager
    def unreachable(self) -> Iterator[None]:
        """Inside the block every request fails; afterwards new ones succeed."""
        self._missing("unreachable")
        yield

    def break_connections(self) -> None:
        """End every connection of the backend from the server's side."""
        self._missing("break_connections")

    def _missing(self, hook: str) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} has no {hook}(), which gives {CAPABILITIES[hook]}. "
            f"Write it, or say in {type(self).__name__}.lacks why it cannot be."
        )
