"""What the interpreter's exit does to the holds that are still open."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from django.conf import settings
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}
settings.configure(DATABASES={"default": database}, INSTALLED_APPS=[])
import django
django.setup()
from angee_jobs.locks import lock, task_lock_is_held
if sys.argv[2] == "look":
    print(task_lock_is_held("k"))
else:
    kept = lock("k", hold_at_least=float(sys.argv[2]) or None)
    assert kept.acquire()
"""


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HOLD, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize(("at_least", "held"), [("0.02", "False"), ("60", "True")])
def test_a_hold_that_is_open_at_exit_ends_but_not_before_its_least_time(tmp_path, at_least, held):
    database = str(tmp_path / "db.sqlite3")
    run(database, at_least)
    assert run(database, "look") == held
