"""What can be done with a `Lock` object."""

import copy
import pickle
import threading
import unittest
from typing import Any

import pytest

from angee_jobs.locks import LockLostError, LockNotAcquiredError, lock
from angee_jobs.locks.testing import ContractCase
from tests.support.strategies import Local, SqliteTable


def test_a_lock_is_not_copied():
    with lock("one", backend="local") as held:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="detach"):
                duplicate(held)


class OneObject(ContractCase):
    def test_s32_many_threads_release_one_hold_and_one_of_them_did_it(self) -> None:
        for _ in range(5):
            held = self.lock()
            held.acquire()
            start = threading.Barrier(6)

            def release(held: Any = held, start: threading.Barrier = start) -> bool:
                start.wait(10)
                return bool(held.release())

            answers = [thread.result() for thread in [self.in_background(release) for _ in range(6)]]
            assert sorted(answers) == [False] * 5 + [True]
            self.assert_free()

    def test_a_refused_block_of_one_object_does_not_end_the_hold_of_another_thread(self) -> None:
        shared = self.lock()

        def enter() -> None:
            with pytest.raises(LockNotAcquiredError), shared:
                self.fail("two holders")

        with shared:
            for _ in range(3):
                self.in_background(enter).result()
            assert shared.held
            self.assert_held()
        self.assert_free()

    def test_check_without_a_hold_raises(self) -> None:
        held = self.lock()
        with pytest.raises(LockLostError):
            held.check()
        with held:
            held.check()
        with pytest.raises(LockLostError):
            held.check()

    def test_two_holds_never_have_one_owner_id(self) -> None:
        owners = set()
        held = self.lock()
        for _ in range(20):
            held.acquire()
            owners.add(held.owner_id)
            held.release()
        assert len(owners) == 20


class TestLocal(OneObject, unittest.TestCase):
    strategy = Local()


class TestSqlite(OneObject, unittest.TestCase):
    strategy = SqliteTable()
