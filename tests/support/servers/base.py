"""What every server of the tests has: its process, its log, its life and its death."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

START_TIMEOUT = STOP_TIMEOUT = 40.0
LAUNCHER = Path(__file__).parent.with_name("launch.py")
DATABASE = "angee_tests"
ADMIN = "tests-admin"  # the application name of our own connections
SBIN = "/usr/sbin:/usr/local/sbin"  # where Debian puts servers, and a user's PATH does not look

T = TypeVar("T")


class ServerError(Exception):
    """A server did not do what was asked of it; the text ends with the end of its log."""


def eventually(predicate: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
    """Return the first true answer of `predicate`, asked every few milliseconds; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or predicate}")
        time.sleep(0.005)
    return answer


def at_exit(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[[], None]:
    """As `atexit.register`, but not for processes that this one forks. Returns what unregisters it."""
    owner = os.getpid()

    def call() -> None:
        if os.getpid() == owner:
            function(*args, **kwargs)

    atexit.register(call)
    return lambda: atexit.unregister(call)


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def missing_packages(*names: str) -> str | None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"needs the packages {', '.join(missing)}" if missing else None


def require(reason: str | None) -> None:
    """Skip the test for `reason`, or fail it where nothing may be missing; None is no reason."""
    import pytest

    if reason and os.environ.get("ANGEE_JOBS_REQUIRE_SERVERS"):
        pytest.fail(f"{reason}, and ANGEE_JOBS_REQUIRE_SERVERS is set", pytrace=False)
    if reason:
        pytest.skip(reason)


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")


class User(NamedTuple):
    uid: int
    gid: int


SELF = User(-1, -1)


def unprivileged_user() -> User:
    """Whom a server runs as that refuses to run as root."""
    if os.geteuid() != 0:
        return SELF
    nobody = pwd.getpwnam("nobody")
    return User(nobody.pw_uid, nobody.pw_gid)


class Server:
    """One server process: its directory, its log, its life and its death."""

    user = SELF
    stop_signals: Mapping[str, int] = {"fast": signal.SIGTERM, "immediate": signal.SIGKILL}
    orphan_signal: int = signal.SIGKILL  # what the server gets when the tests die

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.log_path = self.directory / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._paused: list[Any] = []
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._forget_exit: Callable[[], None] = lambda: None

    # What a kind of server defines

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this server cannot run here, or None."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make what the first start needs."""

    def argv(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether the server answers; asked until it does. May raise."""
        raise NotImplementedError

    # Life

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def paused(self) -> bool:
        return bool(self._paused)

    def start(self) -> None:
        if self.running:
            return
        self.make_directory(self.directory)
        self.prepare()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._launch(self.argv()), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._forget_exit()
        self._forget_exit = at_exit(self._end)
        deadline, problem = time.monotonic() + START_TIMEOUT, None
        while True:
            if not self.running:
                raise self.error(f"ended at its start with code {self.process.returncode}")
            try:
                if self.ready():
                    return
            except Exception as error:
                problem = error
            if time.monotonic() >= deadline:
                self._end()
                raise self.error(f"does not answer {START_TIMEOUT:g} s after its start") from problem
            time.sleep(0.01)

    def stop(self, mode: str = "fast") -> None:
        """Stop in the way that `mode` names: "fast" is orderly, "immediate" is a crash."""
        process = self.process
        if process is None:
            return
        self.resume()
        tree = self._tree()
        if process.poll() is None:
            process.send_signal(self.stop_signals[mode])
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._end()
            raise self.error(f"does not stop within {STOP_TIMEOUT:g} s") from None
        self._gone(tree)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL every process of the server, as a power failure would, and wait until they are gone."""
        if self.process is None:
            return
        tree = self._tree()
        for process in tree:
            with contextlib.suppress(Exception):
                process.kill()
        self.process.kill()
        self.process.wait(STOP_TIMEOUT)
        self._gone(tree)
        self._forget_pause()

    def pause(self) -> None:
        """SIGSTOP every process of the server: connections stay open and nothing answers."""
        if not self.running:
            raise self.error("is not running")
        stopped: list[Any] = self._paused
        while fresh := [process for process in self._tree() if process not in stopped]:
            for process in fresh:  # the parent comes first, and forks no more
                with contextlib.suppress(Exception):
                    process.suspend()
                stopped.append(process)
        # Should the tests die now, this shell sees the end of its input and wakes the server, which then dies too.
        pids = " ".join(str(process.pid) for process in stopped)
        if self._watchdog is None:
            self._watchdog = subprocess.Popen(
                ["/bin/sh", "-c", f"read line || kill -CONT {pids}"], stdin=subprocess.PIPE, start_new_session=True
            )

    def resume(self) -> None:
        """SIGCONT what `pause()` stopped."""
        for process in reversed(self._paused):
            with contextlib.suppress(Exception):
                process.resume()
        self._forget_pause()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Paused inside the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def heal(self) -> None:
        """Running and answering, whatever the last test did to it."""
        self.resume()
        self.start()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    # What it said

    def log(self, since: int = 0) -> str:
        """The server's log from byte `since` on; `log_size()` is the byte to remember."""
        return self.log_path.read_bytes()[since:].decode(errors="replace") if self.log_path.exists() else ""

    def log_size(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def error(self, text: str) -> ServerError:
        return ServerError(f"{type(self).__name__} in {self.directory} {text}\n{self.log()[-2000:]}")

    # Inside

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if self.user != SELF:
            os.chown(path, *self.user)

    def run(self, *argv: str | Path) -> None:
        """Run a program to its end as the server's user."""
        done = subprocess.run(
            self._launch(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise self.error(f"{argv[0]} failed: {done.stdout}{done.stderr}")

    def _launch(self, argv: Sequence[str | Path]) -> list[str]:
        how = [os.getpid(), *self.user, int(self.orphan_signal)]
        return [sys.executable, "-I", "-S", str(LAUNCHER), *map(str, how), *map(str, argv)]

    def _tree(self) -> list[Any]:
        """The server's processes, parent first. They compare by pid and start time: a pid used again is another."""
        import psutil

        assert self.process is not None
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _gone(self, tree: list[Any]) -> None:
        """Wait for the end of processes that are not our children, or the next start finds their shared memory."""
        import psutil

        def alive() -> list[Any]:
            return [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

        def none_alive() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return not alive()
            return False

        try:
            eventually(none_alive, STOP_TIMEOUT)
        except AssertionError:
            raise self.error(f"left processes behind: {alive()}") from None

    def _forget_pause(self) -> None:
        self._paused.clear()
        if self._watchdog is not None:
            self._watchdog.communicate(b"done\n", timeout=STOP_TIMEOUT)
            self._watchdog = None

    def _end(self) -> None:
        """The quickest way to no process at all."""
        self._forget_exit()
        self.kill()
