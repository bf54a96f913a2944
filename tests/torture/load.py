"""The steady mixed load of the soak, in one process: `python -m tests.torture.load BACKEND INDEX REGISTER PACE KEYS`.

KEYS keys are used before anything is measured, so that the caches of names are full. REGISTER is the database of the
guarded transactions.

About every PACE seconds one of the things that people do with locks. A line of JSON with what this process has in
memory goes to its standard output whenever a line comes in on its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


class Load:
    def __init__(self, backend: str, index: int, register: str) -> None:
        self.backend = backend
        self.index = index
        self.register = register
        self.random = random.Random(f"{backend}/{index}")
        self.counts: dict[str, int] = {}
        self.errors: list[str] = []
        #: How often a backend gave no answer, which a machine with very much to do is enough for.
        self.unanswered = 0
        self._serial = 0
        session = backend == "postgres_advisory"
        self.kinds: list[tuple[Callable[[], Any], int]] = [
            (self.block, 8),
            (self.wait, 3),
            (self.refused, 3),
            (self.coroutine, 3),
            (self.threads, 1),
            (self.lose, 2),
            (self.guard, 3),
            (self.look, 2),
            (self.reap, 1),
        ]
        if not session and backend != "local":
            self.kinds.append((self.hand_over, 2))

    def new_key(self) -> str:
        """A key that was never used before, as those of records are."""
        self._serial += 1
        return f"soak-{self.index}-{self._serial}"

    def shared_key(self) -> str:
        """A key that the other processes of this backend use too (tokens of two backends cannot be compared)."""
        return f"soak-{self.backend}-{self.random.randrange(2)}"

    def one(self) -> None:
        kinds, weights = zip(*self.kinds, strict=True)
        [kind] = self.random.choices(kinds, weights)
        from angee_jobs.locks import LockBackendError

        try:
            kind()
        except LockBackendError:
            self.unanswered += 1
        except Exception as error:
            self.errors.append(f"{kind.__name__}: {error!r}")
            del self.errors[:-20]
        self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1

    # What people do

    def block(self) -> None:
        from angee_jobs.locks import lock

        with lock(self.new_key(), backend=self.backend) as held:
            held.check()

    def wait(self) -> None:
        from angee_jobs.locks import LockNotAcquiredError, lock

        try:
            with lock(self.shared_key(), timeout=2, backend=self.backend):
                time.sleep(self.random.uniform(0.0, 0.3))
        except LockNotAcquiredError:
            pass

    def refused(self) -> None:
        from angee_jobs.locks import lock, task_lock

        key = self.new_key()
        with lock(key, backend=self.backend), task_lock(key, backend=self.backend) as acquired:
            assert not acquired

    def coroutine(self) -> None:
        from angee_jobs.locks import lock

        keys = [self.new_key(), self.new_key()]

        async def hold(key: str) -> None:
            async with lock(key, timeout=10, backend=self.backend):
                await asyncio.sleep(0.01)

        async def all_of_them() -> None:
            await asyncio.gather(*(hold(key) for key in keys * 2))

        asyncio.run(all_of_them())

    def threads(self) -> None:
        from angee_jobs.locks import lock

        key = self.new_key()

        def hold() -> None:
            with lock(key, timeout=10, backend=self.backend):
                time.sleep(0.01)

        threads = [threading.Thread(target=hold) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def lose(self) -> None:
        from angee_jobs.locks import LockLostError, force_release, lock

        key = self.new_key()
        try:
            with lock(key, backend=self.backend):
                assert force_release(key, backend=self.backend)
        except LockLostError:
            return
        raise AssertionError("a loss was not told")

    def guard(self) -> None:
        from django.db import close_old_connections, transaction

        from angee_jobs.locks import LockNotAcquiredError, lock

        try:
            with lock(self.shared_key(), timeout=2, backend=self.backend) as held:
                with transaction.atomic(using=self.register), held.guard(using=self.register):
                    pass
        except LockNotAcquiredError:
            pass
        finally:
            close_old_connections()

    def hand_over(self) -> None:
        from angee_jobs.locks import attach_lock, lock

        key = self.new_key()
        mine = lock(key, backend=self.backend)
        assert mine.acquire()
        with attach_lock(key, mine.detach(ttl=5), backend=self.backend) as held:
            held.check()

    def look(self) -> None:
        from angee_jobs.locks import held_locks, lock, lock_info, task_lock_is_held

        key = self.new_key()
        with lock(key, note="soak", backend=self.backend):
            assert lock_info(key, backend=self.backend) is not None
            assert task_lock_is_held(key, backend=self.backend)
            assert any(info.name.endswith(key) for info in held_locks(backend=self.backend))

    def reap(self) -> None:
        from angee_jobs.locks import lock, reap_expired_locks

        left = lock(self.new_key(), ttl=0.05, backend=self.backend)
        assert left.acquire()
        if self.backend == "postgres_advisory":
            left.release()
        else:
            time.sleep(0.1)
        reap_expired_locks(backend=self.backend)

    # What is left of it

    def report(self) -> dict[str, Any]:
        from angee_jobs.locks.renewal import renewer

        gc.collect()
        return {
            "objects": len(gc.get_objects()),
            "threads": threading.active_count(),
            "holds": len(renewer.holds),
            "counts": self.counts,
            "errors": self.errors,
            "unanswered": self.unanswered,
        }


def main(backend: str, index: str, register: str, pace: str, keys: str) -> None:
    import django

    django.setup()
    from angee_jobs.locks import LockBackendError, lock

    load = Load(backend, int(index), register)
    stop = threading.Event()
    asked = threading.Event()

    def listen() -> None:
        for _ in sys.stdin:
            asked.set()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    for number in range(int(keys)):
        with contextlib.suppress(LockBackendError), lock(f"soak-warm-up-{index}-{number}", backend=backend):
            pass
        if number % 50 == 0:
            time.sleep(0.05)
    while not stop.is_set():
        load.one()
        time.sleep(load.random.uniform(0.5, 1.5) * float(pace))
        if asked.is_set():
            asked.clear()
            print(json.dumps(load.report()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
