"""The tutorial, followed to the letter: its files are written, its commands run, their output compared."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.docpages import ROOT, Block, blocks
from tests.support.servers import missing_packages, require

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]

POSTGRESQL = "The same on PostgreSQL"
LISTED = re.compile(r"(default .* )angee:record:stock\.Shelf:1:add$", re.M)
SLOW = "time.sleep(3)"
#: In the place of the slow part that has no lock: both tasks are in it at once, however late one of the workers starts.
MEETING = """open(f"in-{time.monotonic_ns()}", "x").close()
    while len([*__import__("pathlib").Path().glob("in-*")]) < 2:
        time.sleep(0.05)"""


class Shell:
    """Runs a line as a terminal would in which the project's Python is the first one."""

    def __init__(self, tmp_path):
        commands = tmp_path / "bin"
        commands.mkdir()
        for name, program in {"python": "", "django-admin": "-m django"}.items():
            (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {program} "$@"\n')
            (commands / name).chmod(0o755)
        self.where = tmp_path / "work"
        self.where.mkdir()
        self.environment = os.environ | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
        self.environment |= {"PYTHONPATH": str(ROOT), "SHOP_PASSWORD": "secret"}
        for name in ("DJANGO_SETTINGS_MODULE", "ANGEE_JOBS_TEST_DIR"):
            self.environment.pop(name, None)

    def run(self, line: str) -> str:
        done = subprocess.run(
            line,
            shell=True,
            cwd=self.where,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        expected = (137, -9) if "kill -9" in line else (0,)
        assert done.returncode in expected, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def follow(self, block: Block) -> None:
        """Write the file that stands above the block, or run its commands."""
        if file := re.fullmatch(r"\*\*([\w/.]+)\*\*(, at the end:)?", block.above):
            text = with_the_tasks_that_are_here(block.text)
            if SLOW in text and "task_lock" not in text:
                text = text.replace(SLOW, MEETING)
            path = self.where / file[1]
            path.write_text(path.read_text() + f"\n{text}" if file[2] else text)
        elif block.language == "console":
            expected = printed = ""
            for line in block.text.splitlines():
                if not line.startswith("$ "):
                    expected += line + "\n"
                elif " pip install " not in line:
                    printed = self.run(line.removeprefix("$ "))
                    if "run_locked" in line and "list_locks" in line:
                        listed = LISTED.search(printed)
                        assert listed, printed
                        assert "[run_locked " in listed[1]
                        assert (" -  " in listed[1]) == (block.section == POSTGRESQL)
            assert not expected or printed == expected, block
        else:
            assert block.language == "text", f"{block}: no file is named above it"


@pytest.fixture
def shell(tmp_path):
    require(missing_packages("django_tasks_db"))
    return Shell(tmp_path)


def with_the_tasks_that_are_here(text: str) -> str:
    """What the page says of Django 5.2, where that is the one that is here."""
    return text.replace("django.tasks", "django_tasks") if missing_packages("django.tasks") else text


def test_the_tutorial(shell):
    for block in blocks(ROOT / "docs" / "tutorial.md"):
        if block.section != POSTGRESQL:
            shell.follow(block)


def test_the_tutorial_on_postgresql(shell, postgres):
    """A reader who has PostgreSQL from the start: the files, the database, who holds the lock, and kill -9."""
    shown = [*blocks(ROOT / "docs" / "tutorial.md")]
    postgres.query("CREATE DATABASE shop")
    try:
        for block in shown:
            if (block.language == "python" and block.section != POSTGRESQL) or "startproject" in block.text:
                shell.follow(block)
            elif "makemigrations" in block.text:
                shell.run("python manage.py makemigrations stock")
        [settings, *commands] = [block for block in shown if block.section == POSTGRESQL][1:]
        shell.follow(settings)
        where = {"HOST": str(postgres.directory), "PORT": postgres.port, "USER": "postgres"}
        with (shell.where / "shop" / "settings.py").open("a") as file:
            file.write(f"DATABASES['default'] |= {where}\n")
        for block in commands:
            shell.follow(block)
        for block in shown:
            if block.section == "What if the holder is killed?":
                shell.follow(block)
        assert shell.run("python manage.py list_locks").count("\n") <= 1
    finally:
        postgres.query("DROP DATABASE shop WITH (FORCE)")
