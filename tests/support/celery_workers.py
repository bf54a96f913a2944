"""A Celery app on a broker of the tests' own, its workers, and a way to talk with the tasks that run in them."""

from __future__ import annotations

import importlib
import os
import secrets
from typing import Any

from angee_jobs.locks import lock
from tests.support.procs import Child
from tests.support.servers import ValkeyServer, eventually


class CeleryQueue:
    def __init__(self, server: ValkeyServer) -> None:
        self.server = server
        self._workers: dict[str, Child] = {}

    def __enter__(self) -> CeleryQueue:
        os.environ["ANGEE_JOBS_TEST_BROKER"] = str(self.server.socket_path)
        self.tasks: Any = importlib.import_module("tests.support.children.celery_app")
        self.canvas: Any = importlib.import_module("tests.support.children.celery_canvas")
        self.app = self.tasks.app
        self.client = self.server.connect(decode_responses=True, socket_timeout=60)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers.values():
            worker.end()
        # Results that a failed test keeps would ask the broker once more when they go, which is gone then.
        self.app.backend.remove_pending_result = lambda result: result
        self.app.close()
        self.client.close()

    # Workers

    def start_worker(self, pool: str = "prefork", size: int = 1, *more: str, queue: str) -> Child:
        worker = Child("celery_app:worker", pool, size, "-Q", queue, "-n", f"{queue}@tests", *more).start()
        eventually(lambda: "ready." in worker.stderr(), 40, "the worker is ready")
        return worker

    def shared_worker(self, pool: str = "prefork") -> str:
        """The queue of a worker for tasks that end by themselves."""
        return self._kept(f"shared-{pool}", pool, 2)[1]

    def killable_worker(self) -> tuple[Child, str]:
        """A worker with one child, and its queue. Each test that uses it leaves nothing running in it."""
        return self._kept("killable", "prefork", 1)

    def log_of(self, queue: str) -> str:
        """What a worker that is kept has logged so far."""
        return self._workers[queue].stderr()

    def _kept(self, queue: str, pool: str, size: int) -> tuple[Child, str]:
        if queue not in self._workers:
            self._workers[queue] = self.start_worker(pool, size, queue=queue)
        return self._workers[queue], queue

    # Tasks

    def send(self, task: str, *args: Any, queue: str, **options: Any) -> Any:
        return getattr(self.tasks, task).apply_async(args, queue=queue, **options)

    def heard(self, key: str, within: float = 15.0) -> list[str]:
        """What a task said next."""
        said = self.client.blpop([f"said:{key}"], timeout=within)
        assert said, f"no task said anything about {key} within {within:g} s"
        return said[1].split()

    def silent(self, key: str) -> bool:
        return self.client.llen(f"said:{key}") == 0

    def go(self, key: str) -> None:
        self.client.rpush(f"go:{key}", "go")


def make(key: Any, **options: Any) -> Any:
    return lock(key, backend="sqlite", **({"ttl": 20} | options))


def is_free(key: Any) -> bool:
    probe = make(key)
    return probe.acquire() and probe.release()


def new_key() -> str:
    return f"celery-{secrets.token_hex(5)}"
