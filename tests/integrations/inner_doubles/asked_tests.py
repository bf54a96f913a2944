"""Run by pytest without the option: only who asks gets local locks."""

import unittest

import pytest

from angee_jobs.locks import LocalLockBackend, get_lock_backend


def is_local():
    return isinstance(get_lock_backend(), LocalLockBackend)


@pytest.mark.local_locks
def test_the_mark():
    assert is_local()


def test_the_fixture(local_locks):
    assert is_local()


def test_nothing_asked():
    assert not is_local()


@pytest.mark.local_locks
class TestOfUnittest(unittest.TestCase):
    def test_the_mark(self):
        assert is_local()
