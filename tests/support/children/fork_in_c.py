"""A server that forks in C, of which Python is told nothing: its children use the locks of the master."""

import ctypes
import faulthandler
import os
import time
import traceback

from angee_jobs.locks import lock
from tests.support.children import hear, say


def child(number: int, backend: str, shared) -> None:
    faulthandler.dump_traceback_later(25, exit=True)
    for _ in range(10):
        with shared as held:
            say("in", number)
            time.sleep(0.02)
            held.check()
            say("out", number)
    with lock("kept", ttl=3, backend=backend) as held:  # a lease that has to be renewed
        pass
    say("refused", number, int(lock("parents", backend=backend).acquire()))
    mine = lock(f"renewed-{number}", ttl=1.5, backend=backend)
    with mine as held:
        time.sleep(3.5)
        say("held", number, int(held.held))


def main(backend: str) -> None:
    shared = lock("job", ttl=30, timeout=30, backend=backend)
    with shared:  # as an application does while the master imports it: threads and connections are there
        pass
    with lock("kept", ttl=3, backend=backend):
        pass
    parents = lock("parents", ttl=60, backend=backend)
    assert parents.acquire()
    # A fork in C while another thread takes the interpreter's own lock hangs the child, with or without us. The thread
    # that watches the holds looks each second, and sleeps in between.
    time.sleep(1.5)
    for number in (1, 2):
        if ctypes.PyDLL(None).fork() == 0:
            try:
                child(number, backend, shared)
            except BaseException:
                say("failed", number, repr(traceback.format_exc()))
            finally:
                os._exit(0)
    hear("go on")
    say("parent", int(parents.held), int(parents.release()))
