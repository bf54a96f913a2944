"""The worker processes and the servers, as the measuring process sees them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.contenders import Void, ensure

ROOT = Path(__file__).parent.parent


class WorkerFailed(Exception):
    """A worker ended, or met an error that says nothing about its lock."""


class Worker:
    """One worker process; see ``worker.py`` for what it can be asked for."""

    def __init__(self, contender: str) -> None:
        self.contender = contender
        self._ready = False
        apps = {"ANGEE_JOBS_BENCH_APPS": "pgactivity,pglock"} if contender.endswith("/django-pglock") else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", contender],
            cwd=ROOT,
            env=os.environ | apps | {"DJANGO_SETTINGS_MODULE": "benchmarks.settings"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        if not self._ready:
            self.answer()
            self._ready = True

    def tell(self, task: str, **how: Any) -> None:
        """Ask for something without waiting for the answer."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": task, "with": how}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(f"{self.contender} ended with code {self._process.wait(10)}")
        reply = json.loads(line)
        if "void" in reply:
            raise Void(f"{self.contender}: {reply['void']}")
        if "error" in reply:
            raise WorkerFailed(f"{self.contender}: {reply['error']}")
        return reply["answer"]

    def ask(self, task: str, **how: Any) -> Any:
        self.tell(task, **how)
        return self.answer()

    def end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def crew(contenders: list[str], each: int = 1) -> Iterator[dict[str, list[Worker]]]:
    """So many workers of each contender."""
    workers: dict[str, list[Worker]] = {}
    try:
        # The first one of each alone: some make their tables, and not all of them can stand company then.
        for count in (1, each):
            for contender in contenders:
                some = workers.setdefault(contender, [])
                some += [Worker(contender) for _ in range(count - len(some))]
            for contender in contenders:
                for worker in workers[contender]:
                    worker.ready()
        yield workers
    finally:
        everyone = [worker for some in workers.values() for worker in some]
        ending = [threading.Thread(target=worker.end) for worker in everyone]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()


def assert_excludes(holder: Worker, other: Worker, key: str) -> None:
    """Void unless ``other`` is refused while ``holder`` has it, and only then."""
    ensure(holder.ask("take", key=key), f"{holder.contender}: refused {key} that nobody holds")
    ensure(not other.ask("attempt", key=key), f"{other.contender}: took {key} that another process holds")
    ensure(holder.ask("give", key=key), f"{holder.contender}: lost {key} although nobody took it")
    ensure(other.ask("attempt", key=key), f"{other.contender}: refused {key} that was released")


class Servers:
    """PostgreSQL and Valkey in a directory of their own, with all tables."""

    postgres: Any = None
    valkey: Any = None


@contextlib.contextmanager
def servers(storages: set[str]) -> Iterator[Servers]:
    """The servers that these storages need, and the settings of workers that use them."""
    from tests.support.servers import PostgresServer, ValkeyServer, free_port

    directory = Path(tempfile.mkdtemp(prefix="angee-bench-", dir="/tmp" if os.path.isdir("/tmp") else None))
    directory.chmod(0o711)
    port = free_port()
    os.environ["ANGEE_JOBS_BENCH_DIR"] = str(directory)
    os.environ["ANGEE_JOBS_TEST_DIR"] = str(directory)  # for root: PostgreSQL's programs, where its user finds them
    os.environ["ANGEE_JOBS_BENCH_REDIS_PORT"] = str(port)
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    running = Servers()
    try:
        with contextlib.ExitStack() as stack:
            migrate = ["default"]
            if storages & {"postgres", "advisory"}:
                server = PostgresServer(directory / "pg", port=54329, options={"max_connections": 400})
                running.postgres = stack.enter_context(server)
                migrate.append("postgres")
            if "redis" in storages:
                running.valkey = stack.enter_context(ValkeyServer(directory / "valkey", port=port))
            for alias in migrate:
                command = [sys.executable, "-m", "django", "migrate", "--database", alias, "-v", "0", "--skip-checks"]
                subprocess.run(command, cwd=ROOT, check=True)
            yield running
    finally:
        shutil.rmtree(directory, ignore_errors=True)
