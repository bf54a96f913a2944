"""Scenario 39: the test runs of a project that takes locks end well, and leave no database and no session behind."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import eventually

pytestmark = pytest.mark.timeout(180)  # whole test runs, on a machine that may be busy

INNER = Path(__file__).parent / "inner"
TABLE = "angee_jobs.locks.TableLockBackend"


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


def run(database, *command, backend=TABLE):
    environment = os.environ | {
        "INNER_DATABASE": json.dumps(database),
        "PYTHONPATH": os.pathsep.join([str(INNER), str(INNER.parent.parent)]),
    }
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    if backend:
        environment["INNER_BACKEND"] = backend
    done = subprocess.run(
        [sys.executable, *command], cwd=INNER, env=environment, capture_output=True, text=True, timeout=80, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    for trouble in ("Traceback", "being accessed by other users", "Lost the lock"):
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
