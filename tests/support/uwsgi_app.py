"""A WSGI application for a uWSGI that forks its workers after the import, in C: it has used locks by then."""

import os
import time
from pathlib import Path

import django

django.setup()

from angee_jobs.locks import lock  # noqa: E402

BACKEND = os.environ["UWSGI_LOCK_BACKEND"]
LOG = Path(os.environ["UWSGI_LOG"])
shared = lock("job", ttl=3, timeout=30, backend=BACKEND)

with shared:  # in the master
    pass
time.sleep(1)  # the thread that watches the holds sleeps when the master forks


def note(word):
    with LOG.open("a") as log:
        log.write(f"{word} {os.getpid()}\n")


def application(environ, start_response):
    with shared as held:
        note("in")
        time.sleep(1.5)
        held.check()
        note("out")
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]
