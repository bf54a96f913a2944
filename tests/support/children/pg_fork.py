"""Opens a session with PostgreSQL, forks, and waits to be killed; the forked process lives on for a while."""

import os
import time

from angee_jobs.locks import clock
from angee_jobs.locks.backends.postgres.session import Session
from tests.support.children import say


def main() -> None:
    session = Session("postgres", clock.now() + 5)
    say("session", session.server_pid)
    if os.fork() == 0:
        say("forked", os.getpid())
    time.sleep(30)
