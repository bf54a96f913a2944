"""The workers of a run: started, killed, replaced, and asked to end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

from tests.support.procs import faketime
from tests.support.servers import eventually
from tests.torture.ground import Ground
from tests.torture.log import Log, now
from tests.torture.zygote import Zygote

#: How many workers each backend has, and how many of these have a wall clock that is set by an hour at random.
WORKERS, CLOCKED = 8, 2
#: How long a worker that is asked to end may take: a request that is being waited for, and then some.
END_SECONDS = 30.0


class Crew:
    def __init__(self, ground: Ground, log: Log, seed: str, workers: int, keys: int) -> None:
        self.ground = ground
        self.log = log
        self.random = random.Random(f"{seed}/crew")
        self.workers = workers
        self.keys = keys
        self.alive: dict[int, tuple[str, int]] = {}
        self.stopped: dict[int, float] = {}
        self.statuses: dict[int, int] = {}
        self._changed = threading.Condition()
        self.clock_file = ground.directory / "clock"
        self.clock_file.write_text("+0")
        clock = faketime(0)
        #: Why no wall clock can be set; empty if one can.
        self.no_clock = "" if clock else "libfaketime is not installed"
        env = {} if clock is None else {"LD_PRELOAD": clock["LD_PRELOAD"], "DONT_FAKE_MONOTONIC": "1"}
        # Without the library, the planted bug that trusts the client's clock reads the file itself.
        env |= {"FAKETIME_TIMESTAMP_FILE": str(self.clock_file), "FAKETIME_CACHE_DURATION": "1"}
        errors = ground.logs / "errors.txt"
        self.errors = errors
        self.zygotes = [Zygote(errors, {}, self._ended), Zygote(errors, env, self._ended)]
        for zygote in self.zygotes:
            ground.callback(zygote.end)

    def _ended(self, pid: int, status: int) -> None:
        with self._changed:
            self.statuses[pid] = status
            self.alive.pop(pid, None)
            self.stopped.pop(pid, None)
            self._changed.notify_all()

    def start(self) -> None:
        for backend in self.ground.backends:
            for index in range(self.workers):
                self.spawn(backend, index)

    def spawn(self, backend: str, index: int) -> int:
        zygote = self.zygotes[1 if index < CLOCKED else 0]
        seed = str(self.random.random())
        register = self.ground.register_of(backend)
        logs = str(self.ground.logs)
        pid = zygote.spawn(backend=backend, seed=seed, register=register, keys=self.keys, logs=logs)
        with self._changed:
            if pid not in self.statuses:
                self.alive[pid] = backend, index
        return pid

    def pick(self, backend: str) -> int | None:
        """Some worker of ``backend`` that runs."""
        with self._changed:
            pids = sorted(pid for pid, (its, _) in self.alive.items() if its == backend and pid not in self.stopped)
        return self.random.choice(pids) if pids else None

    # Faults

    def kill(self, pid: int) -> int | None:
        """Kill a worker; the index that a new one would have, or None if it had ended already."""
        with self._changed:
            known = self.alive.get(pid)
        if known is None:
            return None
        # First noted, then done: what the worker wrote after that does not count for it.
        self.log.write("fault", kind="kill", pid=pid, t0=now(), t1=now(), backend=known[0])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return known[1]

    def stop(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.stopped[pid] = now()
            os.kill(pid, signal.SIGSTOP)

    def resume(self, pid: int) -> None:
        since = self.stopped.pop(pid, None)
        with self._changed:
            backend, _ = self.alive.get(pid, ("", 0))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        if since is not None and backend:
            self.log.write("fault", kind="stop", pid=pid, t0=since, t1=now(), backend=backend)

    def set_clock(self, seconds: float) -> None:
        before = now()
        draft = self.clock_file.with_suffix(".new")
        draft.write_text(f"{seconds:+g}")
        draft.rename(self.clock_file)
        self.log.write("fault", kind="clock", t0=before, t1=now())

    # The end

    def end(self) -> list[str]:
        """Ask all workers to end, and wait for it; what went wrong."""
        for pid in list(self.stopped):
            self.resume(pid)
        with self._changed:
            pids = list(self.alive)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        with self._changed:
            while self.alive and time.monotonic() < deadline:
                self._changed.wait(1.0)
            stuck = dict(self.alive)
        for pid in stuck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)  # its threads are shown in the errors
        if stuck:
            with contextlib.suppress(AssertionError):
                eventually(lambda: not self.alive, 5.0)
        failed = [f"{pid} ended with status {status}" for pid, status in self.statuses.items() if status not in (0, -9)]
        return [f"{backend}: {pid} does not end" for pid, (backend, _) in stuck.items()] + failed

    def logs_of(self, backend: str) -> list[Path]:
        return sorted(self.ground.logs.glob(f"{backend}.*.log"))
