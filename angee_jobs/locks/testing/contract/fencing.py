"""Promise 7, first half: fencing tokens go up, whatever happens to the storage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from ...backends.base import OPERATION_SECONDS
from ...clock import now
from ...keys import LockKey
from . import tasks
from .base import SHORT, ContractCase, eventually


class Fencing(ContractCase):
    requires: ClassVar[Sequence[str]] = ("fencing",)

    def prepare(self) -> None:
        self.tokens: list[int] = []

    def take(self, key: LockKey | None = None) -> None:
        """Hold the lock once more, and check that its token is larger than all before."""
        with self.lock(key, timeout=10) as held:
            token = held.fencing_token
        self.assertIs(type(token), int)
        assert token is not None
        self.assertGreater(token, max(self.tokens, default=0))
        self.tokens.append(token)

    def test_a_token_is_a_positive_integer_that_fits_64_bits(self) -> None:
        self.take()
        self.assertLess(self.tokens[0], 2**63)

    def test_up_over_releases(self) -> None:
        for _ in range(20):
            self.take()

    def test_up_over_expiry_and_take_over(self) -> None:
        self.needs("leases")
        late = self.lock(ttl=SHORT)
        late.acquire()
        assert late.fencing_token is not None
        self.tokens.append(late.fencing_token)
        self.take()

    def test_s04_up_over_release_and_reap(self) -> None:
        self.needs("leases")
        self.take()
        late = self.lock(ttl=SHORT)
        late.acquire()
        assert late.fencing_token is not None
        self.tokens.append(late.fencing_token)
        eventually(lambda: not self.backend.is_held(self.key))
        self.backend.reap(0, 1000, now() + OPERATION_SECONDS)
        self.take()

    def test_s04_up_over_a_deleted_hold(self) -> None:
        self.needs("delete_hold")
        self.take()
        held = self.lock()
        held.acquire()
        assert held.fencing_token is not None
        self.tokens.append(held.fencing_token)
        self.strategy.delete_hold(self.key)
        self.take()
        self.assertFalse(held.release())

    def test_s04_up_over_an_emptied_storage(self) -> None:
        self.needs("empty")
        for _ in range(3):
            for _ in range(5):
                self.take()
            self.strategy.empty()
            self.take()

    def test_s04_a_hold_of_an_emptied_storage_is_lost(self) -> None:
        self.needs("empty")
        held = self.lock()
        held.acquire()
        assert held.fencing_token is not None
        self.tokens.append(held.fencing_token)
        self.strategy.empty()
        self.take()
        self.assertIs(held.extend(), False)
        self.assertTrue(held.lost)
        self.assertIs(held.release(), False)

    def test_up_from_process_to_process(self) -> None:
        one, two = self.peer(), self.peer()
        for _ in range(3):
            for peer in (one, two):
                [token] = peer.call(tasks.acquire_and_release, self.key, 1, backend=self.alias)
                self.assertGreater(token, max(self.tokens, default=0))
                self.tokens.append(token)
            self.take()

    def test_tokens_of_concurrent_holders_are_different(self) -> None:
        peers = [self.peer() for _ in range(2)]
        for peer in peers:
            peer.begin(tasks.acquire_and_release, self.key, 20, backend=self.alias)
        mine = tasks.acquire_and_release(self.key, 20, backend=self.alias)
        sequences = [mine, *(peer.result(60) for peer in peers)]
        for sequence in sequences:
            self.assertEqual(sequence, sorted(sequence))
        self.assertEqual(len({token for sequence in sequences for token in sequence}), 60)

    def test_a_refused_try_and_an_extension_change_no_token(self) -> None:
        with self.lock() as held:
            token = held.fencing_token
            self.assertFalse(self.lock().acquire())
            held.extend()
            self.assertEqual(held.fencing_token, token)
        self.assertIsNotNone(token)

    def test_server_time_is_the_floor(self) -> None:
        """Tokens are at least the server's time in microseconds, so that no smaller one can follow a crash."""
        self.take()
        self.assertGreater(self.tokens[0], 1_600_000_000 * 1_000_000)
        self.assertLess(self.tokens[0], (time.time() + 400 * 24 * 3600) * 1e6)
