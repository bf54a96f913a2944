"""Receivers of the signals that fail or are slow: they break no lock."""

from __future__ import annotations

import logging
import threading
import unittest
from unittest import mock

from angee_jobs.locks import reap_expired_locks, signals
from angee_jobs.locks.testing import ContractCase, eventually
from angee_jobs.locks.testing.contract.base import RENEWED, SHORT
from tests.support.strategies import Local, SqliteTable


class Receivers(ContractCase):
    def test_a_failing_receiver_breaks_nothing(self) -> None:
        names = ("lock_acquired", "lock_refused", "lock_released", "lock_lost", "locks_reaped")
        called: list[str] = []

        def fail(sender: type, **arguments: object) -> None:
            called.append("failing")
            raise RuntimeError("a receiver that fails")

        for name in names:
            getattr(signals, name).connect(fail)
        try:
            with self.assertLogs("angee_jobs", "ERROR"), self.hear(*names) as heard:
                with self.lock():
                    assert not self.lock().acquire()
                self.assert_free()
                if "leases" not in self.strategy.lacks:
                    late = self.lock(ttl=SHORT)
                    late.acquire()
                    eventually(lambda: any(name == "lock_lost" for name, _ in heard))
                    reap_expired_locks(backend=self.alias)
        finally:
            for name in names:
                getattr(signals, name).disconnect(fail)
        assert "lock_acquired" in [name for name, _ in heard]
        assert "lock_refused" in [name for name, _ in heard]
        assert "lock_released" in [name for name, _ in heard]
        assert called

    def test_the_thread_of_a_slow_receiver_of_losses_renews_nothing(self) -> None:
        self.needs("leases")
        go_on, called = threading.Event(), threading.Event()

        def slow(sender: type, **arguments: object) -> None:
            called.set()
            go_on.wait(20)

        signals.lock_lost.connect(slow)
        try:
            with self.lock(self.new_key(), ttl=RENEWED) as held:
                late = self.lock(ttl=SHORT)
                late.acquire()
                assert called.wait(SHORT + 5)
                self.is_renewed(held)
                assert held.held
        finally:
            go_on.set()
            signals.lock_lost.disconnect(slow)

    def test_no_signal_costs_a_look_at_the_holder(self) -> None:
        self.needs("listing")
        with (
            self.lock(),
            mock.patch.object(self.backend, "inspect", side_effect=AssertionError("it looked")),
            mock.patch.object(logging.getLogger("angee_jobs.locks"), "isEnabledFor", return_value=False),
        ):
            assert self.lock().acquire() is False


class TestLocal(Receivers, unittest.TestCase):
    strategy = Local()


class TestSqlite(Receivers, unittest.TestCase):
    strategy = SqliteTable()
