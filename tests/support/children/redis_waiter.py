"""Processes that use the Redis backend while the test does something to them, or to the server."""

import os
import random
import signal
import sys
import time

from angee_jobs.locks import LockBackendError, lock, lock_backends, task_lock
from tests.support.children import hear, say


def main(backend: str, key: str) -> None:
    """Takes the lock whenever it is told to, and says how long that took."""
    say("ready")
    while (line := hear()) != "end":
        timeout = float(line)
        say("waiting")
        with lock(key, timeout=timeout, backend=backend):
            say("acquired", time.time())
            hear("release")
            before = time.time()
        say("released", before)


class Interrupted(Exception):
    pass


def interrupts(backend: str, seconds: str) -> None:
    """Locks and unlocks while a signal handler raises at random instants."""
    armed = False

    def handler(signum: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    key = f"interrupted-{os.getpid()}"
    lock(key, backend=backend)
    signal.signal(signal.SIGALRM, handler)
    instants = random.Random(os.getpid())
    until = time.monotonic() + float(seconds)
    interrupted = entered = 0
    while time.monotonic() < until:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, instants.uniform(0.00001, 0.003))
            for _ in range(100):  # not for ever: Python drops what is raised in a finalizer
                # Refused until the renewal thread has given up what an interrupted try was granted.
                with task_lock(key, ttl=60, backend=backend) as acquired:
                    entered += acquired
        except Interrupted:
            interrupted += 1
        except LockBackendError as error:
            if not isinstance(error.__context__, Interrupted):
                raise
        finally:
            armed = False
    verbs = lock_backends.verbs(backend)
    deadline = time.monotonic() + 10
    while verbs.is_held(key) and time.monotonic() < deadline:
        time.sleep(0.01)
    say("done", interrupted, entered, int(verbs.is_held(key)), len(verbs.connections._idle))


def forks(backend: str, key: str) -> None:
    """Forks inside a block: the child takes other locks, and ends in every way."""
    verbs = lock_backends.verbs(backend)
    with lock(key, backend=backend, ttl=3) as held:
        verbs.remaining("angee:name:other", time.clock_gettime(time.CLOCK_BOOTTIME) + 5)
        for how in ("exit", "_exit", "block"):
            pid = os.fork()
            if pid == 0:
                assert lock_backends.verbs(backend) is not verbs
                assert verbs.connections._idle == []
                assert not lock(key, backend=backend).acquire()
                with lock("the child's", timeout=5, backend=backend):
                    pass
                if how == "_exit":
                    os._exit(0)
                elif how == "exit":
                    sys.exit(0)
                else:
                    break
            _, status = os.waitpid(pid, 0)
            say("child", how, os.waitstatus_to_exitcode(status))
            held.check()
            held.extend()
            assert not lock(key, backend=backend).acquire()
    if pid != 0:
        say("free", int(not verbs.is_held(key)))
        with lock(key, backend=backend):
            say("again")


def silent_names(folder: str) -> None:
    """In a mount namespace of its own, where the name server never answers: what becomes of this process meanwhile."""
    import socket
    import threading

    from django.conf import settings

    from tests.support.children.silent_names import NAME_SERVER, silence

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        try:
            silent.bind((NAME_SERVER, 53))
            problem = silence(folder)
        except OSError as error:
            problem = str(error)
        if problem:
            say("impossible", problem)
            return
        settings.CACHES["silent"] = settings.CACHES["redis"] | {"LOCATION": "redis://redis.angee.test:6379"}
        settings.ANGEE_JOBS_LOCKS["silent"] = {
            "BACKEND": "angee_jobs.locks.RedisLockBackend",
            "OPTIONS": {"cache": "silent"},
        }
        longest, over = 0.0, threading.Event()

        def tick() -> None:
            nonlocal longest
            last = time.monotonic()
            while not over.wait(0.01):
                now = time.monotonic()
                longest, last = max(longest, now - last), now

        ticking = threading.Thread(target=tick)
        with lock(f"kept-{os.getpid()}", ttl=2, backend="redis") as held:
            ticking.start()
            for _ in range(3):
                started = time.monotonic()
                try:
                    lock("names", backend="silent").acquire(timeout=1)
                except LockBackendError:
                    say("failed", f"{time.monotonic() - started:.2f}")
            over.set()
            ticking.join()
            say("longest", f"{longest:.2f}")
            say("kept", int(held.held))
