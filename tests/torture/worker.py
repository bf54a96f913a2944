"""What a process under fire does: protected sections, one after the other, until it is asked to end or killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from tests.torture.log import Log, now

#: The keys that all workers of a backend fight for.
KEYS = ("a", "b", "c")
#: How long the workers wait for a lock, in seconds; None: not at all.
WAITS = (None, 0.5, 2.0, 4.0)
#: Of objects that its threads share: mostly short, since what goes wrong there does so when one of them is refused.
SHARED_WAITS = (None, None, 0.5)
#: How many threads a worker has: one of these.
THREADS = (1, 2, 3)
#: How often a worker looks whether it still has its lock, in seconds.
BEAT = 0.1
#: How often it forks in the body, writes under guard, is a coroutine, and uses an object that its threads share.
FORKS, WRITES, COROUTINES, SHARED = 0.03, 0.5, 0.15, 0.5


def key_of(backend: str, key: str) -> str:
    """Tokens of two backends cannot be compared, so each has keys of its own."""
    return f"{backend}-{key}"


def sleep(seconds: float) -> None:
    """As ``time.sleep``, which under libfaketime 0.9.10 fails as soon as the clock has been set."""
    select.select([], [], [], seconds)


class Worker:
    """The process: its log, what it notes of the backend, and a thread or more that fight for the locks."""

    def __init__(self, backend: str, seed: str, register: str, keys: int, logs: Path) -> None:
        self.backend = backend
        self.log = Log(logs / f"{backend}.{os.getpid()}.log")
        self.stopping = False
        #: Owner ids of our holds, and the name, the token and the time of the request that won each.
        self.owners: dict[str, tuple[str, int, float]] = {}
        #: The lock objects that the threads share, by key, and how long each waits.
        self.shared: dict[str, tuple[Any, float | None]] = {}
        choice = random.Random(seed)
        self.fighters = [
            Fighter(self, number, f"{seed}/{number}", register, KEYS[:keys]) for number in range(choice.choice(THREADS))
        ]
        signal.signal(signal.SIGTERM, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def _stop(self, *args: object) -> None:
        self.stopping = True

    def run(self) -> None:
        from angee_jobs.locks import lock_lost

        time.sleep = sleep  # the package's own, too
        self._watch_backend()
        lock_lost.connect(self._told)
        self.log.write("up", pid=os.getpid(), backend=self.backend)
        first, *others = self.fighters
        threads = [threading.Thread(target=each.run) for each in others]
        for thread in threads:
            thread.start()
        first.run()
        for thread in threads:
            thread.join()
        if all(each.done for each in self.fighters):
            self.log.write("down")

    # What is written down of the backend

    def _watch_backend(self) -> None:
        """Note when the requests are sent that make and prolong holds, so that the checker can tell when they end."""
        from angee_jobs.locks import lock_backends

        backend = lock_backends.operations(self.backend)
        extend = backend.extend

        def watched(acquire: Any) -> Any:
            def watched_acquire(name: str, owner: str, *rest: Any) -> Any:
                sent = now()
                grant = acquire(name, owner, *rest)
                if grant is not None:
                    self.owners[owner] = name, grant.fencing_token, sent
                return grant

            return watched_acquire

        def watched_extend(extensions: Any, deadline: float) -> Any:
            sent = now()
            extended = extend(extensions, deadline)
            for owner in extended:
                if owner in self.owners:
                    name, token, _ = self.owners[owner]
                    self.log.write("renewed", key=name, token=token, sent=sent)
            return extended

        backend.acquire = watched(backend.acquire)  # type: ignore[method-assign]
        backend.acquire_next = watched(backend.acquire_next)  # type: ignore[method-assign]
        backend.extend = watched_extend  # type: ignore[method-assign]

    def _told(self, *, key: Any, fencing_token: int, reason: str, **rest: object) -> None:
        self.log.write("told", key=key.name, token=fencing_token, why=reason)


class Fighter:
    """One thread of a worker."""

    def __init__(self, worker: Worker, number: int, seed: str, register: str, keys: Sequence[str]) -> None:
        self.worker = worker
        self.backend = worker.backend
        self.log = worker.log
        self.register = register
        self.keys = keys
        self.random = random.Random(seed)
        self.n = number * 1_000_000
        self.children: dict[int, int] = {}
        self._owner: str | None = None
        self.done = False

    def run(self) -> None:
        while not self.worker.stopping:
            if self.random.random() < COROUTINES:
                asyncio.run(self.acquire_async())
            else:
                self.acquire()
            self._reap_children(os.WNOHANG)
            self._sleep(self.random.uniform(0.0, 0.4))
        self._reap_children(0)
        self.done = True

    def _ask(self) -> Any:
        from angee_jobs.locks import lock

        self.n += 1
        wait = self.random.choice(WAITS)
        key = key_of(self.backend, self.random.choice(self.keys))
        if self.random.random() < SHARED or self.backend == "refused_frees_anothers":
            wait = self.random.choice(SHARED_WAITS)
            mine, wait = self.worker.shared.setdefault(key, (lock(key, timeout=wait, backend=self.backend), wait))
        else:
            mine = lock(key, timeout=wait, backend=self.backend)
        self.log.write("try", n=self.n, key=mine.name, wait=wait)
        return mine

    def acquire(self) -> None:
        mine = self._ask()
        with self._answer():
            with mine as held:
                for pause in self._body(held):
                    self._sleep(pause)

    async def acquire_async(self) -> None:
        mine = self._ask()
        with self._answer():
            async with mine as held:
                for pause in self._body(held, writes=0.0):
                    await asyncio.sleep(pause)

    @contextlib.contextmanager
    def _answer(self) -> Generator[None, None, None]:
        """Write down how a try, and its section, came out."""
        from angee_jobs.locks import LockBackendError, LockLostError, LockNotAcquiredError

        self._inside, self._owner = False, None
        try:
            yield
        except LockNotAcquiredError:
            self.log.write("refused", n=self.n)
        except LockLostError:
            self.log.write("left", n=self.n, how="lost")
        except LockBackendError as error:
            if self._inside:
                self.log.write("left", n=self.n, how="failed", why=str(error))
            else:
                self.log.write("failed", n=self.n, why=str(error))
        else:
            self.log.write("left", n=self.n, how="released")
        self.worker.owners.pop(self._owner, None)

    def _body(self, held: Any, writes: float = WRITES) -> Generator[float, None, None]:
        """The protected section, which says after each step how long it wants to sleep."""
        started = now()
        sent = next((sent for _, token, sent in list(self.worker.owners.values()) if token == held.fencing_token), None)
        self._inside, self._owner = True, held.owner_id
        self.log.write("enter", t=started, n=self.n, token=held.fencing_token, sent=sent, believes=held.held)
        length = self.random.choice([0.05, 0.1, 0.1, 0.2, 0.4, 0.8, 3.0]) * self.random.uniform(0.5, 1.5)
        writes_at = self.random.uniform(0.0, length) if self.random.random() < writes else None
        forks_at = self.random.uniform(0.0, length) if self.random.random() < FORKS else None
        after_loss = self.random.choice([0.0, 0.3])
        while True:
            passed = now() - started
            if writes_at is not None and passed >= writes_at:
                writes_at = None
                self._write(held)
            if forks_at is not None and passed >= forks_at:
                forks_at = None
                self._fork(held)
            believes = self._look("seen", held)
            if not believes:
                # Some stop at once, others run on until their block tells them.
                yield after_loss
                break
            if passed >= length or self.worker.stopping:
                break
            yield min(BEAT, max(length - passed, 0.01))
        if self._look("end", held) or after_loss:
            return
        held.check()

    def _look(self, event: str, held: Any) -> bool:
        asked = now()
        believes = held.held and not held.lost
        self.log.write(event, t=asked, n=self.n, believes=believes)
        return believes

    def _write(self, held: Any) -> None:
        from django.db import DatabaseError, connections, transaction

        from angee_jobs.locks import LockBackendError, LockLostError

        token = held.fencing_token
        try:
            with transaction.atomic(using=self.register), held.guard(using=self.register, timeout=2):
                with connections[self.register].cursor() as cursor:
                    cursor.execute(
                        "INSERT INTO torture_register (name, token) VALUES (%s, %s)"
                        " ON CONFLICT (name) DO UPDATE SET token = excluded.token",
                        [held.name, token],
                    )
                    cursor.execute("INSERT INTO torture_history (name, token) VALUES (%s, %s)", [held.name, token])
                sleep(self.random.choice([0.0, 0.0, 0.1]))
        except LockLostError:
            self.log.write("stale", n=self.n)
        except (DatabaseError, LockBackendError) as error:
            self.log.write("unwritten", n=self.n, why=repr(error))
            with contextlib.suppress(DatabaseError):
                connections[self.register].close()
        else:
            self.log.write("wrote", key=held.name, token=token)

    # Children

    def _fork(self, held: Any) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self._child(held)
            finally:
                os._exit(0)
        self.children[pid] = self.n
        self.log.write("fork", n=self.n, child=pid)

    def _child(self, held: Any) -> None:
        """The child has no hold, may end none, and can take locks of its own."""
        from angee_jobs.locks import LockError, task_lock

        def what(function: Any) -> Any:
            try:
                return function()
            except LockError as error:
                return type(error).__name__

        def take() -> bool:
            with task_lock(f"{self.backend}-child-{os.getpid()}", backend=self.backend) as acquired:
                return acquired

        released, extended = what(held.release), what(held.extend)
        self.log.write("child", n=self.n, released=released, extended=extended, took=what(take))

    def _reap_children(self, how: int) -> None:
        for pid, n in list(self.children.items()):
            ended, _ = os.waitpid(pid, how)
            if ended:
                del self.children[pid]
                self.log.write("gone", n=n)

    def _sleep(self, seconds: float) -> None:
        before = now()
        sleep(seconds)
        over = now() - before - seconds
        if over > 0.1:
            self.log.write("lag", seconds=over)
