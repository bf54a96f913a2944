"""Commands as an operator starts them: real processes, their output, signals and exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from django.core.management import ManagementUtility, call_command
from django.test import override_settings

from angee_jobs.locks import Lock, LockKey, force_release, held_locks, lock_backends, lock_info
from tests.support.servers import eventually

ROOT = Path(__file__).parents[2]
#: The lock backends of tests.support.settings_commands. One backend for each test session, and one that is down.
LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "other", "ttl": 30}},
    "local": {"BACKEND": "angee_jobs.locks.LocalLockBackend"},
}


def environment(**more: str) -> dict[str, str]:
    return os.environ | {
        "DJANGO_SETTINGS_MODULE": "tests.support.settings_commands",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
        **more,
    }


def argv(*args: Any) -> list[str]:
    return [sys.executable, str(ROOT / "manage.py"), *map(str, args)]


def manage(*args: Any, timeout: float = 40, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        argv(*args),
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def execute(*args: Any) -> int:
    """Run a command in this process as manage.py does; its exit code. What it prints goes where the test's goes."""
    try:
        ManagementUtility(["manage.py", *map(str, args)]).execute()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def run(*args: Any, **options: Any) -> str:
    out = io.StringIO()
    call_command(*args, stdout=out, **options)
    return out.getvalue()


def one_line_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


def leave_expired(*keys: str) -> None:
    left = [Lock(key, ttl=0.05) for key in keys]
    assert all(each.acquire() for each in left)
    operations = lock_backends.operations("default")
    eventually(lambda: all(operations.inspect(f"angee:name:{key}", float("inf")) is None for key in keys))


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


class Running:
    """A command that runs; its output is read line by line."""

    def __init__(self, *args: Any, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv(*args),
            env=environment(**(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with contextlib.suppress(ValueError):
            self.lines.extend(line.rstrip("\n") for line in iter(self.process.stdout.readline, ""))

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc_info: object) -> None:
        programs = [] if self.process.poll() is not None else children(self.process.pid)
        for pid in (self.process.pid, *programs):  # the program that it runs has a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(5)
        assert not self._reader.is_alive(), "somebody holds its output open"  # to close it would hang then
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()

    def says(self, line: str, timeout: float = 20) -> None:
        def said() -> bool:
            if self.process.poll() is not None and line not in self.lines:
                self._reader.join(5)
                assert line in self.lines, f"ended with {self.process.returncode}, said {self.lines}: {self.errors()}"
            return line in self.lines

        eventually(said, timeout, f"the command says {line!r}; so far {self.lines}")

    def value(self, name: str, timeout: float = 20) -> int:
        """The number in a line ``name=number``."""
        start = f"{name}="
        eventually(lambda: any(line.startswith(start) for line in self.lines), timeout, f"the command says {start}")
        return int(next(line for line in self.lines if line.startswith(start)).removeprefix(start))

    def wait(self, timeout: float = 20) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def errors(self) -> str:
        assert self.process.stderr
        return self.process.stderr.read()


@contextlib.contextmanager
def configured() -> Iterator[None]:
    """The same backends in the test's own process, with nothing held."""
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS):
        for info in held_locks():
            force_release(LockKey.parse(info.name))
        yield


def is_free(key: str) -> bool:
    return lock_info(key) is None


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
