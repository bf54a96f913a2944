"""Promise 11: threads, exceptions at any moment, fork, and functions that many threads call."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ...api import task_lock
from ...errors import LockBackendError
from . import tasks
from .base import KEPT, LONG, RENEWED, ContractCase


class Python(ContractCase):
    def test_s10_the_exception_of_the_body_is_what_the_caller_sees(self) -> None:
        for error in (
            ZeroDivisionError("x"),
            asyncio.CancelledError(),
            KeyboardInterrupt(),
            SystemExit(3),
            GeneratorExit(),
        ):
            for use in (self.lock, lambda: task_lock(self.key, backend=self.alias)):
                with self.subTest(error=repr(error)):
                    with self.assertRaises(type(error)) as caught, use():
                        self.assert_held()
                        raise error
                    self.assertIs(caught.exception, error)
                    self.assert_free()

    def test_s10_also_when_the_release_fails(self) -> None:
        for error in (ZeroDivisionError("x"), asyncio.CancelledError(), KeyboardInterrupt()):
            with self.subTest(error=repr(error)):
                with self._broken_release() as start:
                    with self.assertRaises(type(error)) as caught, self.lock(ttl=KEPT):
                        start()
                        raise error
                self.assertIs(caught.exception, error)
                self.assertTrue(any("away" in note for note in error.__notes__))
                self.becomes_free()

    @contextlib.contextmanager
    def _broken_release(self, error: Exception | None = None) -> Iterator[Callable[[], object]]:
        """Yields a function; once it is called, every release fails until the end of this block."""
        broken = mock.patch.object(self.backend, "release", side_effect=error or LockBackendError("away"))
        try:
            yield broken.start
        finally:
            broken.stop()

    def test_a_release_that_fails_is_told_and_made_up_for(self) -> None:
        with self._broken_release() as start:
            with self.assertRaises(LockBackendError), self.lock() as held:
                start()
            self.assertFalse(held.held)
        self.becomes_free(within=8)

    def test_a_bug_in_the_backend_at_the_release_leaves_nothing_held(self) -> None:
        with self._broken_release(RuntimeError("a bug")) as start:
            body = ZeroDivisionError()
            with self.assertRaises((ZeroDivisionError, RuntimeError)) as caught, self.lock():
                start()
                raise body
            self.assertIn(body, (caught.exception, caught.exception.__context__))
        self.becomes_free(within=8)

    def test_s32_another_thread_releases(self) -> None:
        held = self.lock()
        self.assertTrue(self.in_background(held.acquire).result())
        self.assert_held()
        self.assertIs(self.in_background(held.extend).result(), True)
        self.assertIs(self.in_background(held.release).result(), True)
        self.assert_free()
        held.acquire()
        self.assertIs(self.in_background(held.release).result(), True)
        self.assertIs(held.release(), False)

    def test_s32_a_block_that_another_thread_leaves(self) -> None:
        held = self.lock()
        held.__enter__()
        self.in_background(held.__exit__, None, None, None).result()
        self.assert_free()

    def test_s31_a_fork_inside_a_block(self) -> None:
        if not hasattr(os, "fork"):
            self.skipTest("there is no fork on this system")
        peer = self.new_peer()
        options: dict[str, Any] = {"ttl": RENEWED, "backend": self.alias}
        seen = peer.call(tasks.fork_inside_a_block, self.key, self.new_key(), within=40, **options)
        self.assertNotIn("error", seen["child"])
        self.assertEqual(seen["exit code"], 0, seen)
        child = seen["child"]
        self.assertIn("'held': False", child)
        self.assertIn("'released': False", child)
        self.assertIn("'extended': False", child)
        self.assertIn("'same instance': False", child)
        self.assertIn('"second hold of the parent\'s key": False', child)
        self.assertIn("'own lock renewed': True", child)
        self.assertTrue(seen["held by the parent"])
        self.assertTrue(seen["held at the backend"])
        self.assert_free()

    def test_s44_exceptions_at_random_instants(self) -> None:
        """A signal handler raises while locks are taken, held and released in the main thread of a process."""
        peer = self.new_peer()
        bystander = self.new_key()
        peer.call(tasks.enter, "bystander", bystander, ttl=RENEWED * 1.5, backend=self.alias)
        seen = peer.call(tasks.storm, self.key, 200, ttl=LONG, backend=self.alias, within=50)
        self.assertEqual(seen["unexpected"], [], seen)
        self.assertGreater(seen["struck"], 20, seen)
        self.becomes_free(within=8)
        self.assertFalse(peer.call(tasks.is_lost, "bystander"))
        self.assert_held(bystander)
        self.assertTrue(peer.call(tasks.acquire, "b", self.key, ttl=LONG, backend=self.alias), "it works no more")
        self.assertTrue(peer.call(tasks.release, "b"))
        peer.call(tasks.leave, "bystander")

    def test_s20_a_signal_that_strikes_a_waiter_in_the_main_thread(self) -> None:
        self.needs("verbs")
        peer = self.peer()
        with self.lock():
            peer.call(tasks.strike_when_waiting, self.key, self.alias)
            peer.begin(tasks.acquire, "a", self.key, 30, ttl=LONG, backend=self.alias)
            with self.assertRaises(tasks.Struck):
                peer.result()
        self.assert_free()
        self.assertTrue(peer.call(tasks.acquire, "b", self.key, ttl=LONG, backend=self.alias))
        self.assertTrue(peer.call(tasks.release, "b"))

    def test_locks_nest_and_leave_in_any_order(self) -> None:
        first, second = self.lock(), self.lock(self.new_key())
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        self.assert_free()
        self.assert_held(second.key)
        second.__exit__(None, None, None)
        self.assert_free(second.key)
