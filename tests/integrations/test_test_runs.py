"""Scenario 39: the test runs of a project that takes locks end well, and leave no database and no session behind.

Also when tests leave locks held: those are released, and named.
"""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.support.procs import ROOT
from tests.support.servers import eventually

pytestmark = pytest.mark.timeout(180)  # whole test runs, on a machine that may be busy

INNER = Path(__file__).parent / "inner"
TABLE = "angee_jobs.locks.TableLockBackend"
#: Where the package is not installed, its plugin has to be named.
PLUGIN = () if entry_points(group="pytest11", name="angee_jobs") else ("-p", "angee_jobs.pytest_plugin")


@pytest.fixture
def on_file(tmp_path):
    real = tmp_path / "inner.sqlite3"
    yield {"ENGINE": "django.db.backends.sqlite3", "NAME": str(real), "TEST": {"NAME": str(tmp_path / "test.sqlite3")}}
    assert not (tmp_path / "inner.sqlite3.locks").exists(), "the tests used the locks of the real database"


@pytest.fixture
def in_memory(on_file):
    return on_file | {"TEST": {}}


@pytest.fixture
def on_postgres(postgres):
    yield {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "inner",
        "USER": "postgres",
        "HOST": str(postgres.directory),
        "PORT": str(postgres.port),
    }
    names = postgres.query("SELECT datname FROM pg_database WHERE datname LIKE '%inner%'")
    assert names == [], "test databases are left"
    eventually(lambda: not [session for session in postgres.sessions() if "inner" in session.database], 10)


def run(database, *command, backend=TABLE, runner=None, code=0):
    environment = os.environ | {
        "INNER_DATABASE": json.dumps(database),
        "PYTHONPATH": os.pathsep.join([str(INNER), str(ROOT)]),
    }
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    if backend:
        environment["INNER_BACKEND"] = backend
    if runner:
        environment["INNER_RUNNER"] = runner
    done = subprocess.run(
        [sys.executable, *command], cwd=INNER, env=environment, capture_output=True, text=True, timeout=80, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    for trouble in ("Traceback",) * (not code) + ("being accessed by other users", "Lost the lock"):
        assert trouble not in output, output
    return output


def manage_py_test(database, *options, **how):
    assert "Ran 11 tests" in run(database, "manage.py", "test", "--noinput", *options, **how)


def test_s39_manage_py_test_and_again_in_parallel_on_sqlite(on_file):
    manage_py_test(on_file)
    manage_py_test(on_file, "--parallel", "2")


def test_s39_manage_py_test_and_again_in_parallel_on_postgresql(on_postgres):
    manage_py_test(on_postgres)
    manage_py_test(on_postgres, "--parallel", "2")


def test_s39_manage_py_test_in_memory(in_memory):
    manage_py_test(in_memory, "--parallel", "2")


def test_s39_manage_py_test_without_the_setting(in_memory, on_file):
    manage_py_test(in_memory, backend=None)
    manage_py_test(on_file, backend=None)


@pytest.mark.skipif(importlib.util.find_spec("pytest_django") is None, reason="needs the package pytest-django")
@pytest.mark.parametrize("kind", ["in_memory", "on_postgres"])
def test_s39_pytest_django(kind, request):
    database = request.getfixturevalue(kind)
    output = run(database, "-m", "pytest", "-c", "pytest.ini", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert "11 passed" in output


# On PostgreSQL without the setting, locks are session locks: one that is held keeps the database from being dropped.

LEAVE = ("shop.left.LeavesTest", "shop.left.ClassWideTest")
RUNNER = "angee_jobs.locks.testing.runner.LockTestRunner"


def test_a_lock_that_a_test_left_is_released_at_its_end_and_named(on_postgres):
    output = run(on_postgres, "manage.py", "test", "--noinput", *LEAVE, backend=None, runner=RUNNER, code=1)
    assert "FAILED (failures=1)" in output
    assert "shop.left.LeavesTest.test_1_fails_with_a_lock left locks held" in output
    assert "angee:name:orders of 'default'" in output
    assert "The test run left locks held, which were released now: angee:name:class-wide of 'default'" in output


def test_a_lock_that_a_test_left_in_another_process(on_postgres):
    classes = ("shop.left.PassesTest", "shop.left.MorePassesTest")
    output = run(
        on_postgres, "manage.py", "test", "--noinput", "--parallel", "2", *classes, backend=None, runner=RUNNER
    )
    assert "Ran 4 tests" in output
    assert "shop.left.PassesTest.test_1_leaves_a_lock left locks held" in output
    assert "shop.left.MorePassesTest.test_1_leaves_a_lock left locks held" in output


def test_without_the_runner_the_databases_are_dropped_and_the_locks_named(on_postgres):
    output = run(on_postgres, "manage.py", "test", "--noinput", *LEAVE, backend=None, code=1)
    assert "FAILED (failures=1, errors=1)" in output or "FAILED (errors=1, failures=1)" in output
    assert "angee:name:class-wide of 'default', angee:name:orders of 'default'" in output


@pytest.mark.skipif(importlib.util.find_spec("pytest_django") is None, reason="needs the package pytest-django")
def test_a_lock_that_a_test_left_is_released_at_its_end_and_named_by_pytest(on_postgres):
    options = ("-c", "pytest.ini", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "shop/left.py", "-k", "not Passes")
    output = run(on_postgres, "-m", "pytest", *PLUGIN, *options, backend=None, code=1)
    assert "1 failed, 3 passed" in output
    assert "left.py::LeavesTest::test_1_fails_with_a_lock left locks held" in output
    assert "angee:name:orders of 'default'" in output
    assert "The test run left locks held, which were released now: angee:name:class-wide of 'default'" in output
