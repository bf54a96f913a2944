"""Takes locks, forks twice in C, of which Python is told nothing, and lets the children try for one lock."""

import ctypes
import os
import time
import traceback
from typing import Any

from angee_jobs.locks import Lock, clock, lock, lock_backends
from tests.support.children import hear, say

JOB, PARENTS = "angee:name:job", "angee:name:of the parent"


def child(number: int, operations: Any) -> None:
    """Uses the parent's instance of the backend."""
    for turn in range(20):
        owner = f"{number}-{turn}"
        limit = clock.now() + 20
        while operations.acquire(JOB, owner, 30.0, "", clock.now() + 5) is None:
            if clock.now() > limit:
                raise AssertionError("never got it")
            time.sleep(0.002)
        say("in", number)
        time.sleep(0.01)
        say("out", number)
        if not operations.release(JOB, owner, clock.now() + 5):
            raise AssertionError("was not held")
    say("parents", number, int(operations.acquire(PARENTS, owner, 30.0, "", clock.now() + 5) is None))


def main(backend: str) -> None:
    operations = lock_backends.operations(backend)
    with lock("job", ttl=3, backend=backend):
        pass
    held = Lock("of the parent", ttl=60, backend=backend)
    assert held.acquire()
    for number in (1, 2):
        if ctypes.PyDLL(None).fork() == 0:
            try:
                child(number, operations)
            except BaseException:
                say("failed", number, repr(traceback.format_exc()))
            finally:
                os._exit(0)
    hear("go on")
    say("parent", int(held.held), int(held.release()))
