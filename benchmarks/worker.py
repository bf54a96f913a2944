"""One process with one contender. It does what the lines on its standard input say, and answers each with a line.

    python -m benchmarks.worker sqlite/angee_jobs

All moments are on ``time.monotonic``, which the processes of a machine share.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.contenders import CONTENDERS, Contender, Ours, Void, ensure

#: Of the polite contention: how long somebody waits at most, holds, and pauses between.
POLITE_WAIT, POLITE_HOLD, POLITE_PAUSE = 10.0, 0.001, (0.005, 0.015)


#: About how long a batch of a timed loop is to take.
BATCH_SECONDS = 0.002


class Tasks:
    """What a worker can be asked for: its public methods."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._held = contextlib.ExitStack()
        self._entered: list[Any] = []
        self._give: dict[str, Callable[[], object]] = {}

    # Loops.

    def loop(self, form: str, key: str, seconds: float) -> dict[str, float]:
        """Run one of the contender's loops in small batches: how often a second, in the median batch.

        Not the mean: where other programs run as well, that says mostly how much of the processor they take.
        """
        work = functools.partial(getattr(self._contender, form), key)
        times, took = 1, _seconds(work, 1)
        warm = time.perf_counter() + seconds / 4
        while time.perf_counter() < warm:
            took = _seconds(work, times)
            times = max(1, round(times * min(4.0, BATCH_SECONDS / took)))
        batches = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(batches) < 3:
            batches.append(_seconds(work, times))
        return {"rate": times / statistics.median(batches), "batches": len(batches)}

    def threads(self, form: str, key: str, seconds: float, threads: int) -> dict[str, float]:
        """The same loop in several threads, each on a key of its own."""
        counts, failures = [0] * threads, []
        ready = threading.Barrier(threads + 1)

        def run(index: int) -> None:
            try:
                contender = self._contender.of_thread()
                work, mine = getattr(contender, form), f"{key}-{index}"
                work(mine, 3)
                ready.wait(30)
                end = time.perf_counter() + seconds
                while time.perf_counter() < end:
                    work(mine, 1)
                    counts[index] += 1
            except BaseException as error:
                failures.append(repr(error))
                ready.abort()

        running = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
        for each in running:
            each.start()
        with contextlib.suppress(threading.BrokenBarrierError):
            ready.wait(30)
        started = time.perf_counter()
        for each in running:
            each.join()
        ensure(not failures, f"threads failed: {failures[:1]}")
        return {"rate": sum(counts) / (time.perf_counter() - started)}

    # To show that a lock excludes.

    def take(self, key: str) -> bool:
        give = self._contender.take(key)
        if give is not None:
            self._give[key] = give
        return give is not None

    def give(self, key: str) -> bool:
        return bool(self._give.pop(key)())

    def attempt(self, key: str) -> bool:
        """Whether it can be taken now; it is given back at once."""
        return self.take(key) and self.give(key)

    # Hand-over.

    def enter(self, key: str, timeout: float | None = None) -> float:
        """Enter a block and stay in it; when that was."""
        manager = self._contender.block(key, timeout)()
        entered = type(manager).__enter__(manager)
        at = time.monotonic()
        ensure(not self._contender.tells or entered, f"refused {key} after {timeout} s")
        self._entered.append(manager)
        return at

    def leave(self, after: float = 0.0) -> float:
        """Leave the block after so many seconds; the moment before."""
        time.sleep(after)
        at = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.push(self._entered.pop())
        return at

    # Contention.

    def polite(self, key: str, start: float, seconds: float) -> dict[str, Any]:
        """Wait, hold for a moment, pause, and again."""
        return self._contend(key, start, seconds, POLITE_HOLD, POLITE_PAUSE)

    def fight(self, key: str, start: float, seconds: float) -> dict[str, Any]:
        """Take it again as soon as it was given back."""
        return self._contend(key, start, seconds, 0.0, (0.0, 0.0))

    def _contend(
        self, key: str, start: float, seconds: float, hold: float, pause: tuple[float, float]
    ) -> dict[str, Any]:
        make, now, tells = self._contender.block(key, POLITE_WAIT), time.monotonic, self._contender.tells
        waits, spans, refused = [], [], 0
        rng = random.Random(os.getpid())
        time.sleep(max(0.0, start - now()))
        used, end = time.process_time(), start + seconds
        while (asked := now()) < end:
            try:
                with make() as acquired:
                    entered = now()
                    if tells and not acquired:
                        refused += 1
                        continue
                    if hold:
                        time.sleep(hold)
                    left = now()
            except self._contender.refusals:
                refused += 1
                continue
            waits.append(entered - asked)
            spans.append((entered, left))
            if pause[1]:
                time.sleep(rng.uniform(*pause))
        return {"waits": waits, "spans": spans, "refused": refused, "cpu": time.process_time() - used}

    # Holding.

    def hold(self, key: str, count: int, ttl: float) -> dict[str, float]:
        """Enter so many blocks and stay in them; what that took."""
        before = _memory()
        started = time.monotonic()
        contender: Any = self._contender
        for index in range(count):
            acquired = self._held.enter_context(contender.block(f"{key}-{index}", ttl=ttl)())
            ensure(not contender.tells or acquired, f"refused {key}-{index}")
        return {"seconds": time.monotonic() - started, "bytes": _memory() - before}

    def idle(self, seconds: float) -> dict[str, Any]:
        """What the process costs while its callers do nothing."""
        batches = _count_batches(self._contender)
        started, used = time.monotonic(), time.process_time()
        time.sleep(seconds)
        took = time.monotonic() - started
        return {
            "cpu": (time.process_time() - used) / took,
            "threads": _threads() - 1,  # but for the main one
            "batches": batches[0] / took if batches else None,
        }

    def drop(self) -> bool:
        """Leave all the blocks; an error if one was lost."""
        self._held.close()
        return True

    def fill(self, first: int, count: int, seconds: float) -> bool:
        """Leases of others that end after so many seconds."""
        from benchmarks.filling import fill

        fill(self._contender, first, count, seconds)
        return True

    def reap(self) -> dict[str, float]:
        from angee_jobs.locks import reap_expired_locks

        contender: Any = self._contender
        started = time.perf_counter()
        removed = reap_expired_locks(backend=contender.alias)
        return {"removed": removed, "seconds": time.perf_counter() - started}

    def waiters(self, key: str, count: int, timeout: float) -> bool:
        """Start so many threads that wait for one key."""
        self._spans: list[tuple[float, float]] = []
        self._failed: list[str] = []
        make = self._contender.block(key, timeout)

        def wait() -> None:
            try:
                with make():
                    entered = time.monotonic()
                    self._spans.append((entered, time.monotonic()))
            except BaseException as error:
                self._failed.append(repr(error))

        threading.stack_size(256 * 1024)
        self._waiting = [threading.Thread(target=wait, daemon=True) for _ in range(count)]
        for each in self._waiting:
            each.start()
        return True

    def waited(self) -> dict[str, Any]:
        """Wait until all of them have had it."""
        used = time.process_time()
        for each in self._waiting:
            each.join()
        return {"spans": self._spans, "failed": self._failed, "cpu": time.process_time() - used}


def _seconds(work: Callable[[int], None], times: int) -> float:
    started = time.perf_counter()
    work(times)
    return time.perf_counter() - started


def _memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _count_batches(contender: Contender) -> list[int] | None:
    """Count what our renewal asks the backend for."""
    if not isinstance(contender, Ours):
        return None
    from angee_jobs.locks import lock_backends

    backend: Any = lock_backends.operations(contender.alias)
    extend, counted = type(backend).extend, [0]

    def counting(*args: Any) -> Any:
        counted[0] += 1
        return extend(backend, *args)

    backend.extend = counting
    return counted


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever is printed by others
    tasks = Tasks(CONTENDERS[sys.argv[1]]())
    print(json.dumps({"answer": "ready"}), file=answers)
    for line in sys.stdin:
        wanted = json.loads(line)
        try:
            reply = {"answer": getattr(tasks, wanted["do"])(**wanted["with"])}
        except Void as error:
            reply = {"void": str(error)}
        except BaseException as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers)
    os._exit(0)  # whatever is still held or waits: the storage is thrown away


if __name__ == "__main__":
    main()
