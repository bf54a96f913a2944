"""Promise 5: a holder learns of its loss on time, whatever happened to the server and the process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, ClassVar
from unittest import mock

from ...backends.base import Extension
from ...clock import now
from ...errors import LockBackendError, LockLostError
from . import tasks
from .base import KEPT, LONG, NOISE, RENEWED, SHORT, ContractCase, eventually


class Loss(ContractCase):
    """Promise 5."""

    requires: ClassVar[Sequence[str]] = ("leases",)

    def _never_extended(self, answer: Any) -> Any:
        def extend(extensions: Sequence[Extension], deadline: float) -> Collection[str]:
            return answer(deadline)  # type: ignore[no-any-return]

        return mock.patch.object(self.backend, "extend", extend)

    def _lost_on_time(self) -> None:
        with self.hear("lock_lost") as heard:
            started = now()
            with self.assertRaises(LockLostError), self.lock(ttl=KEPT) as held:
                entered = now()
                eventually(lambda: heard, KEPT + NOISE + 5, "lock_lost is sent")
                told = now()
                self.assertTrue(held.lost)
                with self.assertRaises(LockLostError):
                    held.check()
                leaving = now()
            left = now()
        self.assertGreater(told - started, KEPT / 2)
        self.assertLess(told - entered, KEPT + NOISE)
        self.assertLess(left - leaving, NOISE, "leaving the block hung")
        self.assertEqual(len(heard), 1)

    def test_s07_an_unreachable_server_is_a_loss_at_the_end_of_the_lease(self) -> None:
        def unreachable(deadline: float) -> None:
            raise LockBackendError("unreachable")

        with self._never_extended(unreachable):
            self._lost_on_time()

    def test_s07_a_renewal_that_hangs_does_not_hide_the_loss(self) -> None:
        go_on = threading.Event()

        def hang(deadline: float) -> Collection[str]:
            while now() < deadline and not go_on.wait(0.01):
                pass
            raise LockBackendError("no answer in time")

        try:
            with self._never_extended(hang):
                self._lost_on_time()
        finally:
            go_on.set()

    def test_s07_a_server_that_hangs_for_real(self) -> None:
        self.needs("hanging")
        with self.lock(self.new_key()):
            pass  # connected
        with self.hear("lock_lost") as heard:
            held = self.lock(ttl=KEPT)
            with self.assertRaises(LockLostError), held:
                with self.strategy.hanging():
                    hanging = now()
                    eventually(lambda: heard, KEPT + NOISE + 5, "lock_lost is sent")
                    self.assertLess(now() - hanging, KEPT + NOISE)
                    self.assertTrue(held.lost)
                    leaving = now()
                    with contextlib.suppress(LockBackendError):
                        self.assertIs(held.release(), False)
                    self.assertLess(now() - leaving, NOISE, "releasing a lost hold hung")
        self.becomes_free()

    def test_a_lease_counts_from_before_its_request_was_sent(self) -> None:
        """The answer may be late, because the backend counts from the moment of the grant."""
        self.needs("verbs")

        def late(real: Any) -> Any:
            def operation(*args: Any) -> Any:
                answer = real(*args)
                time.sleep(0.2)
                return answer

            return operation

        for operation in ("acquire", "extend"):
            held = self.lock(self.new_key(), ttl=KEPT)
            with mock.patch.object(self.backend, operation, late(getattr(self.backend, operation))):
                self.assertTrue(held.acquire())
                self.assertTrue(operation == "acquire" or held.extend())
            eventually(lambda: not self.backend.is_held(held.key))  # noqa: B023
            self.assertTrue(held.lost, f"by the answer of {operation}() it is still held")

    def test_the_signal_says_what_was_lost(self) -> None:
        with self.hear("lock_lost") as heard:
            held = self.lock(ttl=SHORT)
            held.acquire()
            eventually(lambda: heard, SHORT + NOISE)
        [(_, arguments)] = heard
        self.assertEqual(arguments["key"], self.key)
        self.assertEqual(arguments["backend"], self.alias)
        self.assertIs(arguments["sender"], type(self.backend))
        self.assertEqual(arguments["fencing_token"], held.fencing_token)
        self.assertGreater(arguments["held_for"], SHORT / 2)
        self.assertTrue(arguments["reason"])
        self.assertIsNot(arguments["thread"], threading.main_thread())
        self.assertNotEqual(arguments["thread"].name, "angee-locks-renewal")

    def test_the_exception_of_the_body_stays_after_a_loss(self) -> None:
        error = ZeroDivisionError("of the body")
        with self.assertRaises(ZeroDivisionError) as caught, self.lock(ttl=SHORT, auto_extend=False) as held:
            eventually(lambda: held.lost)
            raise error
        self.assertIs(caught.exception, error)
        self.assertTrue(any(self.key.name in note for note in error.__notes__))

    def test_s12_a_lock_can_be_used_again_after_a_loss(self) -> None:
        held = self.lock(ttl=KEPT, timeout=5)
        self.assertTrue(held.acquire())
        tokens = [held.fencing_token]
        eventually(lambda: held.lost)
        self.assertFalse(held.release())
        self.assertTrue(held.acquire())
        tokens.append(held.fencing_token)
        self.assertTrue(held.held)
        self.assertFalse(held.lost)
        self.assertTrue(held.release())
        self.assertFalse(held.lost)
        with held:
            self.assert_held()
        self.assert_free()
        self.assertEqual(len(set(tokens)), 2 if "fencing" not in self.strategy.lacks else 1)

    def test_s13_a_stopped_holder_learns_its_loss_and_disturbs_nobody(self) -> None:
        peer = self.peer()
        peer.call(tasks.enter, "a", self.key, ttl=KEPT, backend=self.alias)
        peer.stop()
        newer = self.lock(timeout=10)
        self.assertTrue(newer.acquire())
        peer.go_on()
        self.assertIs(peer.call(tasks.is_lost, "a"), True)
        self.assertIs(peer.call(tasks.extend, "a"), False)
        with self.assertRaises(LockLostError):
            peer.call(tasks.leave, "a")
        time.sleep(0.2)
        self.assertTrue(newer.held)
        self.assertTrue(newer.extend())
        self.assert_held()
        self.assertTrue(newer.release())

    def test_s14_leases_survive_the_end_of_every_connection(self) -> None:
        self.needs("break_connections")
        with self.hear("lock_lost") as heard:
            with self.lock(ttl=RENEWED) as held:
                for _ in range(2):
                    self.strategy.break_connections()
                    self.is_renewed(held)
                    self.assertTrue(held.held)
                self.strategy.break_connections()
                self.assert_held()
                self.strategy.break_connections()
                with self.lock(self.new_key()):
                    pass
                self.strategy.break_connections()
        self.assertEqual(heard, [])
        self.assert_free()

    def test_s15_holds_are_given_up_when_the_interpreter_exits(self) -> None:
        peer = self.new_peer()
        first, bad, last = (self.new_key() for _ in range(3))
        options: dict[str, Any] = {"backend": self.alias}
        self.assertTrue(peer.call(tasks.acquire, "first", first, ttl=LONG, **options))
        self.assertTrue(peer.call(tasks.acquire, "bad", bad, ttl=KEPT, **options))
        peer.call(tasks.enter, "last", last, ttl=LONG, **options)
        peer.call(tasks.fail_to_release, self.alias, bad.name)
        self.assertEqual(peer.exit(), 0)
        self.assert_free(first)
        self.assert_free(last)
        self.becomes_free(bad)
