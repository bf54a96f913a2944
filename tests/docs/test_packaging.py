"""What people install: the wheel and the sdist, in an environment that has nothing else but Django."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.servers import missing_packages, require

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]


def run(*command, cwd=ROOT, **environment):
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"} | environment
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def files_of_the_project(*places):
    """The files under ``places`` that are in the repository, or could be: nothing that it ignores."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *places).splitlines()
    return {name for name in listed if (ROOT / name).is_file()}


def names_in(archive):
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist and the wheel."""
    require(missing_packages("hatchling"))
    where = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", where)
    [sdist], [wheel] = where.glob("angee_jobs-*.tar.gz"), where.glob("angee_jobs-*.whl")
    return sdist, wheel


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    names = names_in(built[1])
    assert {name for name in names if ".dist-info/" not in name} == files_of_the_project("angee_jobs")
    needed = ("py.typed", "locks/backends/redis/lua/acquire.lua", "migrations/0001_initial.py", "static/angee_jobs")
    for part in (*needed, "templates/admin/angee_jobs/tasklock/held_locks.html"):
        assert any(name.startswith(f"angee_jobs/{part}") for name in names), part
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_has_what_is_needed_to_test_the_project_and_nothing_else(built):
    places = (
        "angee_jobs",
        "benchmarks",
        "docs",
        "tests",
        "testproject",
        "manage.py",
        "tox.ini",
        ":(glob)*.md",
        "LICENSE",
    )
    added = {"PKG-INFO", "pyproject.toml", ".gitignore"}
    assert names_in(built[0]) == files_of_the_project(*places) | added


def test_the_sdist_gives_the_same_wheel(built, tmp_path):
    with tarfile.open(built[0]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=unpacked)
    [wheel] = tmp_path.glob("*.whl")
    assert names_in(wheel) == names_in(built[1])


def test_the_metadata_is_what_the_package_index_takes(built):
    require(missing_packages("twine"))
    run(sys.executable, "-m", "twine", "check", "--strict", *built)


def test_the_metadata(built):
    with zipfile.ZipFile(built[1]) as wheel:
        [path] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(path).decode())
    assert metadata["Name"] == "angee-jobs"
    assert metadata["Version"] == "0.1.0"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    required = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert required == ["django>=5.2"]
    assert set(metadata.get_all("Provides-Extra")) == {"postgres", "redis"}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The Python of an environment in which nothing but the wheel was asked for."""
    where = tmp_path_factory.mktemp("environment")
    venv.create(where, with_pip=True)
    python = Path(sysconfig.get_path("scripts", "venv", vars={"base": str(where)}), "python")
    command = [python, "-m", "pip", "install", "-q", "--no-compile", built[1]]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        require(f"pip cannot install Django: {done.stderr.strip().splitlines()[-1]}")
    return python


def test_nothing_but_django_is_installed_with_it(installed):
    names = {each["name"].lower() for each in json.loads(run(installed, "-m", "pip", "list", "--format", "json"))}
    assert names - {"tzdata", "setuptools"} == {"angee-jobs", "django", "asgiref", "sqlparse", "pip"}


@pytest.fixture(scope="module")
def project(installed, tmp_path_factory):
    """``manage.py`` of a new project that was given the app."""
    where = tmp_path_factory.mktemp("project")
    run(installed, "-m", "django", "startproject", "shop", where, cwd=where)
    with (where / "shop" / "settings.py").open("a") as settings:
        settings.write('\nINSTALLED_APPS += ["angee_jobs"]\nSTATIC_ROOT = BASE_DIR / "collected"\n')

    def manage(*arguments):
        return run(installed, "manage.py", *arguments, cwd=where)

    manage("migrate", "--verbosity", "0")
    manage.path = where
    return manage


IN_TWO_PROCESSES = """
import subprocess, sys
from angee_jobs.locks import held_locks, lock, task_lock, task_locks_are_cross_process

assert task_locks_are_cross_process()
elsewhere = [sys.executable, "manage.py", "run_locked", "billing-run", "--on-refused", "9", "--", sys.executable, "-V"]
with lock("billing-run"):
    assert [info.name for info in held_locks()] == ["angee:name:billing-run"]
    assert subprocess.run(elsewhere).returncode == 9
assert subprocess.run(elsewhere).returncode == 0
drivers = {"psycopg", "psycopg2", "redis", "valkey", "django_redis", "celery", "django_tasks", "pytest"}
print(sorted(drivers & set(sys.modules)))
"""


def test_a_new_project_excludes_another_process(project):
    assert project("shell", "--verbosity", "0", "-c", IN_TWO_PROCESSES).splitlines()[-1] == "[]"


def test_a_new_project_has_nothing_to_complain_about(project):
    assert "no issues" in project("check")
    assert "No changes" in project("makemigrations", "--check", "--dry-run")
    assert "Removed 0 expired locks of 'default'." in project("reap_locks", "-v", "2")
    project("list_locks")


ADMIN_PAGE = """
from django.contrib.auth.models import User
from django.test import Client
from django.test.utils import setup_test_environment
from angee_jobs.locks import lock

setup_test_environment()
client = Client()
client.force_login(User.objects.create_superuser("operator"))
with lock("billing-run"):
    page = client.get("/admin/angee_jobs/tasklock/", follow=True)
assert page.status_code == 200, page
assert "billing-run" in page.text
"""


def test_a_new_project_shows_its_locks_in_the_admin(project):
    project("shell", "--verbosity", "0", "-c", ADMIN_PAGE)
    project("collectstatic", "--verbosity", "0", "--noinput")
    assert (project.path / "collected" / "angee_jobs" / "held_locks.css").is_file()


TESTS = """
from django.test import TestCase
from angee_jobs.locks import LockLostError, lock
from angee_jobs.locks.testing import LocalLocksMixin, assert_locked, lose

class LockTest(LocalLocksMixin, TestCase):
    def test_it(self):
        with assert_locked("billing-run"), self.assertRaises(LockLostError), lock("billing-run") as held:
            lose(held)
"""


def test_a_new_project_tests_its_locked_code(project):
    (project.path / "shop" / "tests.py").write_text(TESTS)
    project("test", "shop")


UPGRADE = """
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from django.core.management import call_command

from django.utils import timezone

call_command("migrate", "angee_jobs", "zero", verbosity=0)
call_command("migrate", "angee_jobs", "0001", verbosity=0)
apps = MigrationExecutor(connection).loader.project_state([("angee_jobs", "0001_initial")]).apps
apps.get_model("angee_jobs", "LockGuard").objects.create(
    digest="0" * 64, name="angee:name:old", fencing_token=41, passed_at=timezone.now()
)
call_command("migrate", verbosity=0)
from angee_jobs.models import LockGuard
assert LockGuard.objects.get().fencing_token == 41
print(len(MigrationRecorder(connection).migration_qs.filter(app="angee_jobs")))
"""


def test_upgrade_from_the_first_migration_keeps_what_is_stored(project):
    assert int(project("shell", "--verbosity", "0", "-c", UPGRADE)) >= 1
