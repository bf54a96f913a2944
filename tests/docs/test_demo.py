"""`manage.py demo`: what it prints, what it leaves running, what it refuses."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import django
import pytest

from tests.support.procs import ROOT
from tests.support.servers import eventually, missing_packages, require

pytestmark = pytest.mark.timeout(180)

SAMPLE = ROOT / "testproject/messaging/sample.mbox"
MAIL = b"From someone@quay.example Tue Mar  5 13:19:59 2024\nSubject: hello\n\nbody\n\n"


COLUMNS = ("tasks", "refused", "messages", "twice", "lost")


class Demo:
    """`manage.py demo` as a user starts it: without any of our environment, but for where its files go."""

    def __init__(self, directory: Path, *args: str) -> None:
        self.directory = directory
        strange = re.compile(r"DJANGO_|ANGEE_")
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "demo", *args],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not strange.match(name)}
            | {"TMPDIR": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output = ""

    def read_until(self, start: str) -> str:
        """The rest of the first line that begins like this."""
        for line in self.process.stdout:
            self.output += line
            if line.startswith(start):
                return line.removeprefix(start)
        pytest.fail(f"no line {start!r} in:\n{self.output}\n{self.process.stderr.read()}")

    def workers(self) -> list[int]:
        return [int(pid) for pid in self.read_until("Processes: ").split(", ")]

    def finish(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=100)
        return self.process.returncode, self.output + output, errors

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_demo(tmp_path):
    require(missing_packages("django_tasks_db", "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"))
    with contextlib.ExitStack() as stack:

        def start(*args: str) -> Demo:
            demo = Demo(tmp_path, *args)
            stack.callback(demo.close)
            return demo

        yield start


def is_worker(pid: int) -> bool:
    """Whether it still runs; a dead process that nobody waited for has no command line."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return b"messaging.demo.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False
    command = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, check=False)
    return b"messaging.demo.worker" in command.stdout


def test_demo(start_demo, tmp_path):
    usual = ROOT / "testproject.sqlite3"
    before = usual.stat() if usual.exists() else None
    demo = start_demo()
    pids = demo.workers()
    assert len(set(pids)) == 4
    demo.read_until("without locks:")
    assert all(map(is_worker, pids))
    code, output, errors = demo.finish()
    assert (code, errors) == (0, "")
    rows = re.findall(r"^(without locks|with task_lock) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", output, re.MULTILINE)
    without, locked = ({"label": label} | dict(zip(COLUMNS, map(int, row), strict=True)) for label, *row in rows)
    assert without["label"] == "without locks"
    assert without["tasks"] == locked["tasks"] == 12
    assert without["twice"] > 0
    assert without["refused"] == 0
    assert (locked["twice"], locked["lost"]) == (0, 0)
    assert locked["refused"] > 0
    assert locked["messages"] == 2 * SAMPLE.read_bytes().count(b"\nFrom ") + 2
    assert not any(map(is_worker, pids))
    assert list(tmp_path.iterdir()) == []
    assert (usual.stat() if usual.exists() else None) == before


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_ended_demo_leaves_nothing_running(start_demo, tmp_path, signum, code):
    demo = start_demo()
    pids = demo.workers()
    demo.read_until("without locks:")
    demo.process.send_signal(signum)
    assert demo.finish()[0] == code
    eventually(lambda: not any(map(is_worker, pids)), what="the workers end")
    if signum != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_is_reported(start_demo, tmp_path):
    demo = start_demo()
    pids = demo.workers()
    demo.read_until("without locks:")
    os.kill(pids[2], signal.SIGKILL)
    code, _, errors = demo.finish()
    assert code == 1
    assert errors.startswith(f"CommandError: worker-3 (pid {pids[2]}) died of SIGKILL")
    assert errors.count("\n") == 1
    assert not any(map(is_worker, pids))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"\xff" * 2000, MAIL + b"From here on it is text:\nno headers\n"])
def test_a_bad_mailbox_is_one_line_on_standard_error(start_demo, tmp_path_factory, tmp_path, content):
    path = tmp_path_factory.mktemp("mail") / "box"
    if content is not None:
        path.write_bytes(content)
    code, output, errors = start_demo("--mbox", str(path)).finish()
    assert (code, output) == (1, "")
    assert errors.startswith("CommandError: ")
    assert str(path) in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option", ["--workers=3", "--workers=33", "--channels=0", "--tasks-per-channel=1", "--channels=x"]
)
def test_numbers_that_make_no_demo_are_refused(start_demo, option):
    code, _, errors = start_demo(option).finish()
    assert code == 2
    assert "is not a whole number from" in errors
