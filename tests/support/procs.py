"""Small real processes for the tests, and a line protocol to talk with them.

    with Child("hold_lock", "sqlite", "some-key") as child:     # tests/children/hold_lock.py: main(*args)
        child.expect("acquired", timeout=10)
        ...
        child.send("release")
        child.expect("released")
        assert child.wait() == 0

A child has Django set up under `tests.settings`. It speaks with `say()` and listens with `hear()` of
`tests.support.children`. Tests wait for what a child says, never for time to pass; when a child says something
else, ends, or is silent for too long, the failure shows its standard error.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.servers import eventually

__all__ = ["Child", "ChildError", "eventually", "faketime"]

ROOT = Path(__file__).parents[2]
END = None  # in the queue of lines: the child closed its output


class ChildError(AssertionError):
    """A child process did not say or do what the test expected."""


class Child:
    """A Python process that runs `main(*args)` of a module in `tests.support.children`, or `"module:function"`.

    Arguments go over as text. `env` is added to the environment; None removes a variable.
    """

    def __init__(self, script: str, *args: Any, env: Mapping[str, str | None] | None = None) -> None:
        self.script = script
        self.args = [str(arg) for arg in args]
        self.env = dict(env or {})
        self.process: subprocess.Popen[bytes]
        self.heard: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._started = False

    def __enter__(self) -> Child:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def start(self) -> Child:
        environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        if threading.current_thread() is threading.main_thread():  # or it would die with the thread
            environment["ANGEE_JOBS_TEST_PARENT"] = str(os.getpid())
        environment |= {name: value for name, value in self.env.items() if value is not None}
        for name in (name for name, value in self.env.items() if value is None):
            environment.pop(name, None)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.children", self.script, *self.args],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        self._started = True
        self._reader = threading.Thread(target=self._read, name=f"child-{self.process.pid}", daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self.process.stdout
        with contextlib.suppress(ValueError):
            for line in self.process.stdout:
                self._lines.put(line.decode(errors="replace").rstrip("\n"))
        self._lines.put(END)

    # Talk

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, timeout: float = 20.0) -> str:
        """The next line that the child says."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self.error(f"said nothing for {timeout:g} s") from None
        if line is END:
            self._lines.put(END)
            code = self.process.wait(timeout)
            raise self.error(f"ended with code {code} and said nothing more")
        self.heard.append(line)
        return line

    def expect(self, word: str, timeout: float = 20.0) -> str:
        """The rest of the next line, whose first words must be `word`."""
        line = self.line(timeout)
        if line != word and not line.startswith(f"{word} "):
            raise self.error(f"said {line!r} where {word!r} was expected")
        return line[len(word) + 1 :]

    def silent(self, seconds: float) -> None:
        """Fail if the child says anything (or ends) within the next `seconds`."""
        with contextlib.suppress(queue.Empty):
            line = self._lines.get(timeout=seconds)
            raise self.error(f"said {line!r} where nothing was expected" if line is not END else "ended")

    def send(self, *words: Any) -> None:
        """Say one line to the child."""
        assert self.process.stdin
        try:
            self.process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self.error(f"no longer hears {words!r}") from None

    # Life

    def sigkill(self) -> None:
        """Kill the child (and not what it forked) and wait for its end."""
        self.process.kill()
        self.process.wait(10)

    def sigstop(self) -> None:
        """Stop the child, and return when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        if sys.platform == "linux":
            stat = Path(f"/proc/{self.pid}/stat")
            eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="the child stops")

    def sigcont(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self, timeout: float = 20.0) -> int:
        """The exit code: negative for a signal."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self.error(f"did not end within {timeout:g} s") from None

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def end(self) -> None:
        """Kill whatever is left of the child and of what it forked."""
        if not self._started:
            return
        self._started = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its group: no pid of ours can be reused before wait()
        self.process.wait(10)
        self._reader.join(5)
        for stream in (self.process.stdin, self.process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()

    def error(self, text: str) -> ChildError:
        return ChildError(
            f"child {self.script} {self.args} (pid {self.pid}) {text}\n"
            f"heard so far: {self.heard[-10:]}\nits standard error:\n{self.stderr()[-4000:]}"
        )


def faketime(seconds: float) -> dict[str, str] | None:
    """What `Child(env=...)` needs for a wall clock that is `seconds` off, or None without libfaketime."""
    for library in sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")):
        return {"LD_PRELOAD": str(library), "FAKETIME": f"{seconds:+g}s", "DONT_FAKE_MONOTONIC": "1"}
    return None


def stopwatch() -> Any:
    """A function that tells the seconds since this call."""
    start = time.monotonic()
    return lambda: time.monotonic() - start
