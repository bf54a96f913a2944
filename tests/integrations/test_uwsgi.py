"""A real uWSGI without ``--lazy-apps``: its workers are forked in C, after the application has used locks."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from tests.support.procs import ROOT
from tests.support.servers import eventually, missing_packages, require

pytestmark = pytest.mark.once


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["sqlite", "postgres_advisory"])
def test_workers_of_one_master_exclude_each_other(backend, tmp_path, request):
    """Seen: two workers were inside at once, on the session that both had from their master."""
    require(missing_packages("pyuwsgi"))
    if backend.startswith("postgres"):
        request.getfixturevalue("postgres")
    port, log = free_port(), tmp_path / "log"
    options = ["--http-socket", f"127.0.0.1:{port}", "--master", "--processes", "2", "--enable-threads", "--need-app"]
    options += ["--die-on-term", "--disable-logging", "--module", "tests.support.uwsgi_app"]
    server = subprocess.Popen(
        [sys.executable, "-c", f"import pyuwsgi; pyuwsgi.run({options!r})"],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(ROOT),
            "UWSGI_LOCK_BACKEND": backend,
            "UWSGI_LOG": str(log),
        },
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "stderr").open("w"),
        start_new_session=True,
    )
    try:
        eventually(lambda: _listens(port) or server.poll() is not None, 30, "uWSGI listens")
        answers = []

        def ask():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                answers.append(answer.read())

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(90)
        assert len(answers) == 6, (tmp_path / "stderr").read_text()[-3000:]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(20)
    words = [line.split() for line in log.read_text().splitlines()]
    assert len({pid for _, pid in words}) == 2, "both workers had their turn"
    for (one, mine), (other, its) in zip(words[::2], words[1::2], strict=True):
        assert (one, other) == ("in", "out")
        assert mine == its, "two are inside"


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
