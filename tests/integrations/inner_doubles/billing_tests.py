"""Run by pytest with the option that makes locks local for all tests."""

import unittest

import billing
import pytest
from billing.tests import BillingTests

from angee_jobs.locks import LocalLockBackend, get_lock_backend, lock
from angee_jobs.locks.testing import assert_locked, held_by_other


def test_is_locked():
    with assert_locked("billing-run"):
        billing.run_billing()


@pytest.mark.parametrize("number", range(4))
def test_a_lock_that_is_left_over(number):
    assert lock("left-over").acquire()


def test_leaves_it_to_the_other():
    with held_by_other("billing-run"):
        assert not billing.run_if_free()


class TestOfUnittest(BillingTests, unittest.TestCase):
    test_until_the_commit = None  # needs a database


def test_all_are_local():
    assert isinstance(get_lock_backend(), LocalLockBackend)
