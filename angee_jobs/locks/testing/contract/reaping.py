"""Promise "who holds what": reaping removes what expired, and touches no live hold."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

from ...backends.base import OPERATION_SECONDS
from ...clock import now
from ...operations import (
    reap_expired_locks,
)
from .base import SHORT, ContractCase, eventually


class Reaping(ContractCase):
    requires: ClassVar[Sequence[str]] = ("leases", "listing")

    def prepare(self) -> None:
        reap_expired_locks(backend=self.alias)

    def expired(self, count: int) -> None:
        holds = [self.lock(self.new_key(), ttl=SHORT) for _ in range(count)]
        for each in holds:
            self.assertTrue(each.acquire())
        eventually(lambda: not any(self.backend.is_held(each.key) for each in holds))

    def test_s37_what_expired_is_removed_and_what_lives_is_not(self) -> None:
        live = self.lock()
        live.acquire()
        self.expired(3)
        self.assertEqual(reap_expired_locks(grace=3600, backend=self.alias), 0)
        with self.hear("locks_reaped") as heard:
            self.assertEqual(reap_expired_locks(backend=self.alias), 3)
        [(_, arguments)] = heard
        self.assertEqual((arguments["backend"], arguments["count"]), (self.alias, 3))
        self.assertEqual(reap_expired_locks(backend=self.alias), 0)
        self.assertTrue(live.extend())
        self.assert_held()
        live.release()

    def test_s37_two_reaps_at_once_count_each_row_once(self) -> None:
        self.expired(40)
        start = threading.Barrier(4)

        def reap() -> int:
            start.wait(10)
            return sum(self.backend.reap(0, 7, now() + OPERATION_SECONDS) for _ in range(12))

        counts = [thread.result() for thread in [self.in_background(reap) for _ in range(4)]]
        self.assertEqual(sum(counts), 40, counts)

    def test_s37_reaping_during_heavy_locking_touches_no_live_hold(self) -> None:
        stop = threading.Event()
        self.addCleanup(stop.set)
        keys = [self.new_key() for _ in range(3)]
        rounds = [0] * 6

        def work(number: int) -> None:
            while not stop.is_set():
                with self.lock(keys[number % 3], ttl=5, timeout=20) as held:
                    held.check()
                rounds[number] += 1  # leaving the block would have raised

        workers = [self.in_background(work, number) for number in range(6)]
        eventually(lambda: all(rounds), what="all are at work")
        reapers = [
            self.in_background(lambda: [reap_expired_locks(backend=self.alias) for _ in range(40)]) for _ in range(2)
        ]
        counts = [sum(reaper.result()) for reaper in reapers]
        stop.set()
        for worker in workers:
            worker.result()
        self.assertEqual(counts, [0, 0])

    def test_s05_a_hold_that_was_reaped_is_lost(self) -> None:
        held = self.lock(ttl=SHORT)
        held.acquire()
        eventually(lambda: not self.backend.is_held(self.key))
        self.assertEqual(reap_expired_locks(backend=self.alias), 1)
        newer = self.lock()
        self.assertTrue(newer.acquire())
        self.assertIs(held.release(), False)
        self.assertTrue(held.lost)
        self.assert_held()
        self.assertTrue(newer.release())

    def test_the_list_of_what_a_reap_would_remove(self) -> None:
        self.expired(2)
        limit = now() + OPERATION_SECONDS
        self.assertEqual(len(list(self.backend.list_expired(0, limit))), 2)
        self.assertEqual(len(list(self.backend.list_expired(3600, limit))), 0)
        self.assertEqual(self.backend.reap(0, 1, limit), 1)
        self.assertEqual(len(list(self.backend.list_expired(0, limit))), 1)
        self.assertEqual(self.backend.reap(0, 10, limit), 1)
