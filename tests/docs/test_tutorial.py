"""The tutorial, followed to the letter: its files are written, its commands run, their output compared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.docpages import ROOT, blocks
from tests.support.servers import missing_packages, require

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]

SLOW = "time.sleep(3)"
#: In the place of the slow part that has no lock: both tasks are in it at once, however late one of the workers starts.
MEETING = """open(f"in-{time.monotonic_ns()}", "x").close()
    while len([*__import__("pathlib").Path().glob("in-*")]) < 2:
        time.sleep(0.05)"""


@pytest.fixture
def shell(tmp_path):
    """Runs a line as a terminal would in which the project's Python is the first one."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, program in {"python": "", "django-admin": "-m django"}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {program} "$@"\n')
        (commands / name).chmod(0o755)
    where = tmp_path / "work"
    where.mkdir()
    environment = os.environ | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for name in ("DJANGO_SETTINGS_MODULE", "ANGEE_JOBS_TEST_DIR"):
        environment.pop(name, None)

    def run(line: str) -> str:
        done = subprocess.run(
            line, shell=True, cwd=where, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    run.where = where
    return run


def test_the_tutorial(shell):
    require(missing_packages("django_tasks_db", "django.tasks"))
    for block in blocks(ROOT / "docs" / "tutorial.md"):
        if block.comment.startswith("file: "):
            text = block.text
            if SLOW in text and "task_lock" not in text:
                text = text.replace(SLOW, MEETING)
            write(shell.where / block.comment.removeprefix("file: "), text)
        elif block.language == "console":
            expected = printed = ""
            for line in block.text.splitlines():
                if not line.startswith("$ "):
                    expected += line + "\n"
                elif " pip install " not in line:
                    printed = shell(line.removeprefix("$ "))
                    if "list_locks" in line:
                        assert "angee:record:stock.Shelf:1:add" in printed
                        assert "[run_locked python]" in printed
            assert not expected or printed == expected, block


def write(path: Path, text: str) -> None:
    """A block that brings its own imports is a whole file; another one goes to the end of what startproject made."""
    if text.startswith("import "):
        path.write_text(text)
    else:
        with path.open("a") as file:
            file.write(f"\n{text}")
