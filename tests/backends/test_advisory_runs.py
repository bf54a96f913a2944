"""Scenario 39 with session locks: test runs of a project drop, clone and keep their databases without trouble."""

import importlib.util

import pytest

from tests.integrations.test_test_runs import manage_py_test, on_postgres, run
from tests.support.servers import eventually

__all__ = ["on_postgres"]

ADVISORY = "angee_jobs.locks.PostgresAdvisoryLockBackend"


def test_s39_manage_py_test(on_postgres):
    manage_py_test(on_postgres, backend=ADVISORY)


def test_s39_manage_py_test_in_parallel(on_postgres):
    manage_py_test(on_postgres, "--parallel", "2", backend=ADVISORY)


def test_s39_manage_py_test_keepdb(on_postgres, postgres):
    for _ in range(2):
        manage_py_test(on_postgres, "--keepdb", backend=ADVISORY)
    eventually(lambda: postgres.advisory_locks() == 0)  # a session ends a moment after its process
    postgres.query("DROP DATABASE test_inner", dbname="postgres")


@pytest.mark.skipif(importlib.util.find_spec("pytest_django") is None, reason="needs the package pytest-django")
def test_s39_pytest_django(on_postgres):
    output = run(
        on_postgres,
        "-m",
        "pytest",
        "-c",
        "pytest.ini",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        backend=ADVISORY,
    )
    assert "11 passed" in output
