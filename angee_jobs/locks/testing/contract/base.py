"""The base class of the contract suite's tests, and the tools that they share."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from unittest import mock

from django.db import connections

from ... import signals
from ...api import lock
from ...backends.base import OPERATION_SECONDS, BaseLockBackend
from ...clock import now
from ...conf import lock_backends
from ...keys import LockKey
from ...lock import Lock
from .peers import Peer
from .strategy import CAPABILITIES, Strategy

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object  # so that no test runner takes the contract itself for a test case

T = TypeVar("T")

#: A lease that must run out in a test, in seconds.
SHORT = 0.4
#: A lease that renewals must keep. They keep it even if a thread runs a second late.
KEPT = 1.5
#: A lease that renewals must keep for longer than its length, even if a thread runs a second and a half late.
RENEWED = 2.25
#: A lease that must not end during a test.
LONG = 60.0
#: How late an event may be that must be on time.
NOISE = 2.5


def eventually(answer: Callable[[], T], within: float = 10.0, what: str = "") -> T:
    """Ask every few milliseconds, and return the first true answer; AssertionError without one ``within`` seconds."""
    limit = now() + within
    while not (got := answer()):
        if now() >= limit:
            raise AssertionError(f"not within {within:g} s: {what or answer}")
        time.sleep(0.01)
    return got


class Background(threading.Thread):
    """A call that runs in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True, name=f"contract-{getattr(function, '__name__', 'call')}")
        self._call = (function, args, kwargs)
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        function, args, kwargs = self._call
        try:
            self._value = function(*args, **kwargs)
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()

    def result(self, within: float = 20.0) -> Any:
        """Return or raise what the call returned or raised."""
        self.join(within)
        if self.is_alive():
            raise AssertionError(f"{self.name} did not end within {within:g} s")
        if self._error is not None:
            raise self._error
        return self._value


class ContractCase(_Base):
    """Gives each test a key of its own, ends its threads and processes, and fails it if it leaves anything behind."""

    strategy: Strategy
    #: The capabilities that all tests of this class need; see :meth:`needs`.
    requires: ClassVar[Sequence[str]] = ()

    def setUp(self) -> None:
        super().setUp()
        # A contract is many such classes in one: what one of them prepares is for its own tests.
        part = next(each for each in type(self).__mro__ if self._testMethodName in vars(each))
        assert issubclass(part, ContractCase)
        self.needs(*part.requires)
        self.key = self.new_key()
        self.addCleanup(self.strategy.tear_down)
        self.strategy.set_up()
        self.addCleanup(self._look_for_leftovers)
        self._threads: list[Background] = []
        self.addCleanup(self._join_threads)  # after the cleanups of the test, which may be what they wait for
        part.prepare(self)

    def prepare(self) -> None:
        """Called before each test of this class."""

    # What the tests use.

    @property
    def alias(self) -> str:
        return self.strategy.alias

    @property
    def backend(self) -> BaseLockBackend:
        return lock_backends.operations(self.alias)

    def new_key(self) -> LockKey:
        return LockKey("contract", (self._testMethodName, secrets.token_hex(4)))

    def needs(self, *capabilities: str) -> None:
        """Skip the test unless the backend has all these capabilities."""
        for capability in capabilities:
            assert capability in CAPABILITIES, capability
            if capability in self.strategy.lacks:
                self.skipTest(f"{self.alias} lacks {CAPABILITIES[capability]}: {self.strategy.lacks[capability]}")

    def lock(self, key: LockKey | None = None, *, ttl: float = LONG, **options: Any) -> Lock:
        return lock(key or self.key, ttl=ttl, backend=self.alias, **options)

    def is_free(self, key: LockKey | None = None) -> bool:
        """By a try: the only answer that counts."""
        other = self.lock(key)
        return other.acquire() and other.release()

    def assert_held(self, key: LockKey | None = None, message: str = "") -> None:
        self.assertFalse(self.is_free(key), message or "the lock is free")
        self.assertTrue(self.backend.is_held(key or self.key), "is_held() says something else than a try")

    def assert_free(self, key: LockKey | None = None, message: str = "") -> None:
        self.assertFalse(self.backend.is_held(key or self.key), message or "the lock is held")
        self.assertTrue(self.is_free(key), message or "the lock is held")

    def becomes_free(self, key: LockKey | None = None, within: float = 10.0) -> None:
        eventually(lambda: self.is_free(key), within, "the lock comes free")

    @staticmethod
    def is_renewed(held: Lock) -> None:
        """Wait until the lease of ``held`` is renewed once more."""
        before = held.expires_at
        eventually(lambda: held.expires_at != before, what="the lease is renewed")

    def patient_look(self) -> contextlib.AbstractContextManager[Any]:
        """Inside the block a refusal finds out who holds the lock however long the storage takes to tell it."""
        real = self.backend.inspect
        return mock.patch.object(
            self.backend, "inspect", lambda name, deadline: real(name, deadline + OPERATION_SECONDS)
        )

    @contextlib.contextmanager
    def calls_of(self, *operations: str) -> Iterator[list[int]]:
        """The calls of these operations of the backend for the test's key, each as the number of its thread."""
        calls: list[int] = []

        def noted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(name: str, *args: Any) -> Any:
                if name == self.key.name:
                    calls.append(threading.get_ident())
                return real(name, *args)

            return call

        with contextlib.ExitStack() as stack:
            for each in operations:
                stack.enter_context(mock.patch.object(self.backend, each, noted(getattr(self.backend, each))))
            yield calls

    def in_background(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Background:
        thread = Background(function, *args, **kwargs)
        self._threads.append(thread)
        return thread

    def peer(self) -> Peer:
        """Another process; skips where the backend does not reach it."""
        self.needs("processes")
        peer = Peer.borrow()
        self.addCleanup(peer.give_back)
        return peer

    def new_peer(self, environment: Mapping[str, str] | None = None) -> Peer:
        """A process that only this test uses."""
        self.needs("processes")
        peer = Peer(environment or {})
        self.addCleanup(peer.end)
        return peer

    @contextlib.contextmanager
    def hear(self, *names: str) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        """Yields a list to which each signal of these names about this test's keys is added, with its arguments."""
        heard: list[tuple[str, dict[str, Any]]] = []
        receivers = []
        for name in names:

            def receive(sender: type, name: str = name, **arguments: Any) -> None:
                key = arguments.get("key")
                if key is None or key.parts[0] == self._testMethodName:
                    heard.append((name, {"sender": sender, "thread": threading.current_thread(), **arguments}))

            receivers.append((getattr(signals, name), receive))
        for signal, receive in receivers:
            signal.connect(receive)
        try:
            yield heard
        finally:
            for signal, receive in receivers:
                signal.disconnect(receive)

    # What is left over.

    def _join_threads(self) -> None:
        for thread in self._threads:
            thread.join(20)
            self.assertFalse(thread.is_alive(), f"{thread.name} hangs")

    def _look_for_leftovers(self) -> None:
        found: list[str] = []

        def nothing() -> bool:
            found[:] = [*self._local_leftovers(), *self.strategy.leftovers()]
            return not found

        try:
            eventually(nothing)
        except AssertionError:
            self.fail("left over after the test: " + "; ".join(found))

    def _local_leftovers(self) -> Iterator[str]:
        if "listing" not in self.strategy.lacks:
            for record in self.backend.list_held(now() + OPERATION_SECONDS):
                if record.name.startswith(f"angee:contract:{self._testMethodName}:"):
                    yield f"{record.name} held by {record.holder}"
