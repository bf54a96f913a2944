"""A holder in a process that runs short of something; says what becomes of its lease and of what others try."""

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable

from angee_jobs.locks import Lock, LockBackendError, lock
from angee_jobs.locks.backends.postgres import pool
from tests.support.children import hear, say


def outcome(work: Callable[[], object]) -> str:
    try:
        return str(work())
    except LockBackendError:
        return "LockBackendError"
    except BaseException as error:
        return repr(error).replace(" ", "_")


def descriptors(backend: str) -> None:
    """All that are left are taken while the lease is to be renewed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    with lock("kept", ttl=1.5, backend=backend) as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, limit[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        answers = {}
        waiters = [
            threading.Thread(
                target=lambda key=key: answers.setdefault(
                    key, outcome(lambda: Lock(key, backend=backend).acquire(timeout=1))
                )
            )
            for key in ("kept", "free", "another")
        ]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join(20)
        time.sleep(2.5)
        for each in taken:
            os.close(each)
        say("lost", int(held.lost), *(answers[key] for key in ("kept", "free", "another")))


def end(backend: str) -> None:
    """Idle sessions are closed soon, and the lock is only released when the interpreter ends."""
    pool.IDLE_SECONDS = 0.2
    held = Lock("kept", ttl=600, backend=backend)
    assert held.acquire()
    say("held")
    hear("end")


def main(what: str, backend: str) -> None:
    {"descriptors": descriptors, "end": end}[what](backend)
