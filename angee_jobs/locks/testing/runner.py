"""For ``manage.py test``: each test ends without locks.

Example::

    TEST_RUNNER = "angee_jobs.locks.testing.runner.LockTestRunner"
"""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any

from django.test.runner import DiscoverRunner, ParallelTestSuite, RemoteTestResult, RemoteTestRunner

from .left import live_holds, release_left

if TYPE_CHECKING:
    _Result = unittest.TestResult
    _Runner = DiscoverRunner
else:
    _Result = _Runner = object


class ReleasesAfterEachTest(_Result):
    """Before a class of test results in a class's bases: what a test left held is released at its end, and named."""

    def startTest(self, test: unittest.TestCase) -> None:
        self._held_before = live_holds()
        super().startTest(test)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        release_left(f"The test {test.id()}", self._held_before)


class _RemoteResult(ReleasesAfterEachTest, RemoteTestResult):
    pass


class _RemoteRunner(RemoteTestRunner):
    resultclass = _RemoteResult


class _ParallelSuite(ParallelTestSuite):
    runner_class = _RemoteRunner


class LockTestRunnerMixin(_Runner):
    """Before a :class:`~django.test.runner.DiscoverRunner` in a class's bases: tests leave no lock held.

    What a test left is released at its end, and what is left then (by ``setUpClass``, for instance) before the test
    databases are dropped. A ``RuntimeWarning`` names each.

    Example::

        class Runner(LockTestRunnerMixin, SomeRunner): ...
    """

    parallel_test_suite = _ParallelSuite

    def get_resultclass(self) -> Any:
        base: Any = super().get_resultclass() or unittest.TextTestResult
        return type(base.__name__, (ReleasesAfterEachTest, base), {})

    def teardown_databases(self, old_config: Any, **kwargs: Any) -> None:
        release_left("The test run")
        super().teardown_databases(old_config, **kwargs)


class LockTestRunner(LockTestRunnerMixin, DiscoverRunner):
    """Django's runner, with :class:`LockTestRunnerMixin`."""
