# ruff: noqa: PT009 -- run by Django's test runner, and by pytest
"""Tests that leave locks held. The list keeps them alive, as the traceback of a failure may."""

from django.test import TransactionTestCase

from angee_jobs.locks import lock, task_lock_is_held

kept = []


def acquire(key):
    kept.append(lock(key))
    assert kept[-1].acquire()


class LeavesTest(TransactionTestCase):
    def test_1_fails_with_a_lock(self):
        acquire("orders")
        self.fail("on purpose")

    def test_2_gets_it(self):
        with lock("orders"):
            pass


class PassesTest(TransactionTestCase):
    """For other processes, with --parallel, where a failure could not be pickled."""

    def test_1_leaves_a_lock(self):
        acquire("passed")

    def test_2_gets_it(self):
        with lock("passed"):
            pass


class MorePassesTest(PassesTest):
    def test_1_leaves_a_lock(self):
        acquire("more")

    def test_2_gets_it(self):
        with lock("more"):
            pass


class ClassWideTest(TransactionTestCase):
    """What a class holds for all of its tests stays held, but not beyond the test run."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        acquire("class-wide")

    def test_1(self):
        self.assertTrue(task_lock_is_held("class-wide"))

    def test_2(self):
        self.assertTrue(task_lock_is_held("class-wide"))
