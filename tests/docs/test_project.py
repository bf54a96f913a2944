"""What the project says about itself is true: claims, migrations, imports. What people install: test_packaging.py."""

import itertools
import os
import platform
import re
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import django
import pytest
from django.core.management import call_command

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def tox_matrix() -> set[tuple[str, str]]:
    """The pairs of Python and Django that `tox` runs the suite on."""
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    names = []
    for line in tox["tox"]["env_list"].split():
        parts = [part.split(",") for part in re.split(r"[{}]", line) if part]
        names += map("".join, itertools.product(*parts))
    pairs = {match.groups() for name in names if (match := re.fullmatch(r"py3(\d+)-django(\d)(\d)", name))}
    matrix = {(f"3.{python}", f"{major}.{minor}") for python, major, minor in pairs}
    first_choice = re.match(r"py3(\d+)", tox["testenv:full"]["base_python"])
    newest = re.search(r"Django~=(\d\.\d)", tox["testenv:full"]["deps"])
    assert first_choice
    assert newest
    return matrix | {(f"3.{first_choice[1]}", newest[1])}


def classified(prefix: str) -> set[str]:
    pattern = re.compile(re.escape(prefix) + r" :: (\d+\.\d+)")
    return {match[1] for text in PROJECT["classifiers"] if (match := pattern.fullmatch(text))}


def distribution_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return match[0].lower()


def test_the_versions_that_are_claimed_are_the_ones_that_tox_runs():
    matrix = tox_matrix()
    assert classified("Programming Language :: Python") == {python for python, _ in matrix}
    assert classified("Framework :: Django") == {version for _, version in matrix}


def test_the_lowest_versions_that_are_claimed_are_required():
    def lowest(versions: set[str]) -> str:
        return min(versions, key=lambda version: [int(part) for part in version.split(".")])

    assert PROJECT["requires-python"] == f">={lowest(classified('Programming Language :: Python'))}"
    assert PROJECT["dependencies"] == [f"Django>={lowest(classified('Framework :: Django'))}"]


def test_the_suite_runs_with_every_extra():
    tested = {distribution_name(requirement) for requirement in PYPROJECT["dependency-groups"]["servers"]}
    extras = itertools.chain.from_iterable(PROJECT["optional-dependencies"].values())
    assert {distribution_name(requirement) for requirement in extras} <= tested


@pytest.mark.skipif(not os.environ.get("ANGEE_JOBS_REQUIRE_SERVERS"), reason="any Python will do on a laptop")
def test_everything_runs_on_the_newest_python_and_django():
    newest = max(tox_matrix(), key=lambda pair: [int(part) for part in ".".join(pair).split(".")])
    assert (".".join(platform.python_version_tuple()[:2]), ".".join(map(str, django.VERSION[:2]))) == newest


def test_no_migration_is_missing():
    call_command("makemigrations", "--check", "--dry-run", verbosity=1)


WATCHED_IMPORT = """
import sys

touched = []
watched = {"sqlite3.connect", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"}
sys.addaudithook(lambda event, args: touched.append(event) if event in watched else None)

from angee_jobs.locks import *
import angee_jobs.locks

missing = [name for name in angee_jobs.locks.__all__ if name not in globals()]
drivers = {"psycopg", "psycopg2", "redis", "valkey", "django_redis", "celery", "pytest"} & set(sys.modules)
print("touched", touched, "drivers", sorted(drivers), "missing", missing)
"""

DJANGO_SETUP = "import django; django.setup()\n"


@pytest.mark.parametrize("first", ["", DJANGO_SETUP], ids=["without settings", "with Django set up"])
def test_importing_the_locks_loads_no_driver_and_touches_no_database_or_network(first: str):
    environment = dict(os.environ)
    if not first:
        environment.pop("DJANGO_SETTINGS_MODULE")
    command = [sys.executable, "-c", first + WATCHED_IMPORT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "touched [] drivers [] missing []\n", done.stderr


def test_an_ignored_file_is_never_committed():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout == ""
