"""Makes the workers: a process that has everything imported and forks, so that a worker costs next to nothing.

``python -m tests.torture.zygote PARENT`` reads lines of JSON and writes such: ``{"spawn": {...}}`` is answered by
``{"pid": ...}``, and the end of a worker told by ``{"ended": pid, "status": ...}``. It has one thread, so that it may
fork. It dies with the process that started it, and its workers die with it.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.launch import die_with_parent

ROOT = Path(__file__).parents[2]


class Zygote:
    """The side of the run. ``ended`` is called, on a thread, with the pid and the status of each worker that ends."""

    def __init__(self, errors: Path, env: Mapping[str, str], ended: Callable[[int, int], None]) -> None:
        self._pids: queue.Queue[int] = queue.Queue()
        self._ended = ended
        with errors.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.torture.zygote", str(os.getpid())],
                cwd=ROOT,
                env=os.environ | dict(env) | {"PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            said = json.loads(line)
            if "pid" in said:
                self._pids.put(said["pid"])
            else:
                self._ended(said["ended"], said["status"])

    def spawn(self, **how: Any) -> int:
        """Fork a worker; its pid."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"spawn": how}).encode() + b"\n")
        self.process.stdin.flush()
        return self._pids.get(timeout=30)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(5)


def spawn(backend: str, seed: str, register: str, keys: int, logs: str) -> None:
    """In the child: be a worker."""
    from tests.torture.worker import Worker

    code = 1
    try:
        Worker(backend, seed, register, keys, Path(logs)).run()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # and does not go on as the zygote


def say(**words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def main(parent: str) -> None:
    import logging

    import django

    die_with_parent(int(parent), signal.SIGKILL)
    django.setup()
    logging.disable(logging.ERROR)  # losses and failures are what is asked for here
    import tests.torture.worker  # noqa: F401

    # A worker that is asked to end before it listens for that listens first.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.05)
        if ready:
            chunk = os.read(0, 65536)
            if not chunk:
                return
            buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            me = os.getpid()
            pid = os.fork()
            if pid == 0:
                die_with_parent(me, signal.SIGKILL)
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(null, 1)
                spawn(**json.loads(line)["spawn"])
            say(pid=pid)
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                say(ended=pid, status=os.waitstatus_to_exitcode(status))
        except ChildProcessError:
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
