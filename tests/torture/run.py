"""One run: workers, nemesis, and what the checker says of it."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.support.servers import eventually
from tests.torture.checker import SLACK, Terms, Violation, check, figures
from tests.torture.crew import WORKERS, Crew
from tests.torture.ground import BACKENDS, PLANTED, SESSION_BACKENDS, Ground
from tests.torture.history import Fault, History, put_together
from tests.torture.leftovers import leftovers
from tests.torture.log import Log, read
from tests.torture.nemesis import Nemesis
from tests.torture.worker import KEYS, key_of

#: The length of a lease, in seconds. Short, so that much is decided in little time.
TTL = 2.0


@dataclasses.dataclass
class Result:
    """What came of one backend."""

    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    violations: list[Violation] = dataclasses.field(default_factory=list)


class Run:
    """The run of some backends at once. Used in a ``with``, once in a process."""

    def __init__(
        self, backends: list[str], seed: int | None = None, workers: int = WORKERS, keys: int = len(KEYS)
    ) -> None:
        self.seed = random.randrange(2**32) if seed is None else seed
        self.ground = Ground(backends, ttl=TTL, small_disk="sqlite" in backends)
        self.log = Log(self.ground.logs / "nemesis.log")
        self.crew = Crew(self.ground, self.log, str(self.seed), workers, keys)
        self.nemesis = Nemesis(self.ground, self.crew, self.log, str(self.seed), TTL)
        self.failures: list[str] = []

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.ground.close()

    def not_injected(self) -> list[str]:
        """Faults that cannot be done here, and why."""
        reasons = {
            "a full disk": "" if self.ground.small_disk == "mounted" else self.ground.small_disk,
            "a client's clock": self.crew.no_clock,
        }
        return [f"{what}: {why}" for what, why in reasons.items() if why]

    def start(self) -> None:
        self.crew.start()
        ready = [backend for backend in self.ground.backends for _ in range(self.crew.workers)]
        eventually(
            lambda: sum(len(self.crew.logs_of(backend)) for backend in self.ground.backends) >= len(ready),
            60.0,
            f"all workers are up: {self.errors()}",
        )

    def finish(self) -> dict[str, Result]:
        """End it, and judge it."""
        self.nemesis.relent()
        self.failures = self.crew.end()
        time.sleep(TTL + SLACK)  # the leases of those who were killed are over
        left = leftovers(self.ground)
        results = {backend: self.judge(backend, left[backend]) for backend in self.ground.backends}
        for result in results.values():
            result.violations += [Violation("processes", text) for text in self.failures]
            break
        return results

    def judge(self, backend: str, left: Iterable[str] = ()) -> Result:
        terms = Terms(TTL, session=backend in SESSION_BACKENDS, one_writer=self._server(backend) is None)
        history = self.history(backend)
        return Result(figures(history, terms), self._count(backend, history), check(history, terms, left))

    def history(self, backend: str) -> History:
        faults = [Fault.of(event) for event in self._faults(backend)]
        logs = [read(path) for path in self.crew.logs_of(backend)]
        return put_together(logs, faults, self._register(backend))

    def _server(self, backend: str) -> str | None:
        return (BACKENDS | PLANTED)[backend]

    def _faults(self, backend: str) -> list[dict[str, Any]]:
        server = self._server(backend)
        events = read(self.ground.logs / "nemesis.log")
        return [
            event
            for event in events
            if event.get("backend") == backend or ("backend" not in event and event.get("server") == (server or "none"))
        ]

    def _count(self, backend: str, history: History) -> dict[str, int]:
        counts = Counter(event["kind"] for event in self._faults(backend))
        counts["fork in the body"] = history.counts.get("fork", 0)
        events = read(self.ground.logs / "nemesis.log")
        if not self.crew.no_clock:
            counts["clock"] = sum(event["kind"] == "clock" for event in events)
        return dict(sorted(counts.items()))

    def _register(self, backend: str) -> list[tuple[str, int]]:
        from django.db import connections

        from angee_jobs.locks.keys import as_lock_key

        names = [as_lock_key(key_of(backend, key)).name for key in KEYS]
        alias = self.ground.register_of(backend)
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT name, token FROM torture_history ORDER BY id")
            rows = cursor.fetchall()
        connections[alias].close()
        return [(name, token) for name, token in rows if name in names]

    def errors(self) -> str:
        """What the workers wrote to their standard error."""
        path = self.crew.errors
        return path.read_text(errors="replace")[-8000:] if path.exists() else ""

    def keep(self, directory: str) -> None:
        """Copy the logs, so that somebody can look at them."""
        import shutil

        target = os.path.join(directory, f"torture-{self.seed}")
        shutil.copytree(self.ground.logs, target, dirs_exist_ok=True)
        print(f"the logs are in {target}")
