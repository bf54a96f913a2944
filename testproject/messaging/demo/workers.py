"""The demo's worker processes: started together, looked after, and ended together, whatever happens."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Seconds that a worker gets to end by itself before it is killed.
GRACE = 1

PROJECT_DIR = Path(__file__).resolve().parents[3]


class WorkerDied(Exception):
    """A worker ended on its own; the text says how, with the last line that it wrote."""


class Worker:
    """A `db_worker` process. ``queue`` is one that only this worker serves, besides the default queue."""

    def __init__(self, number: int, directory: str) -> None:
        self.queue = f"worker-{number}"
        self._log = Path(directory, f"{self.queue}.log")
        command = [sys.executable, "-m", "testproject.messaging.demo.worker"]
        options = [f"--worker-id={self.queue}", f"--queue-name=default,{self.queue}", "--interval=0.05"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options, "--no-startup-delay", "--no-reload"],
                cwd=PROJECT_DIR,
                env={**os.environ, "ANGEE_JOBS_DEMO_DIR": directory},
                stdin=subprocess.PIPE,  # kept open, see worker.py
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends its workers
            )

    def check(self) -> None:
        code = self.process.poll()
        if code is None:
            return
        how = f"with exit code {code}" if code >= 0 else f"of {signal.Signals(-code).name}"
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        raise WorkerDied(f"{self.queue} (pid {self.process.pid}) died {how}; it last wrote: {last}")


@contextmanager
def running_workers(count: int, directory: str) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    try:
        for number in range(1, count + 1):
            workers.append(Worker(number, directory))
        yield workers
    finally:
        end([worker.process for worker in workers])


def end(processes: list[subprocess.Popen]) -> None:
    try:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + GRACE
        for process in processes:
            process.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
