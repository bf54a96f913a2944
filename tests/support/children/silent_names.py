"""In a mount namespace of its own, where the name server never answers: how long a try takes, and who stands still."""

import ctypes
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

from django.conf import settings

from angee_jobs.locks import LockBackendError, lock
from tests.support.children import say

NAME_SERVER = "127.53.53.53"


def silence(folder: str) -> str:
    """Why it cannot be done, or nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS
        return os.strerror(ctypes.get_errno())
    configuration = Path(folder) / "resolv.conf"
    configuration.write_text(f"nameserver {NAME_SERVER}\noptions timeout:5 attempts:2\n")
    for command in (["--make-rprivate", "/"], ["--bind", str(configuration), "/etc/resolv.conf"]):
        done = subprocess.run(["mount", *command], capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()
    return ""


def main(folder: str, backend: str) -> None:
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        silent.bind((NAME_SERVER, 53))
        problem = silence(folder)
    except OSError as error:
        problem = str(error)
    if problem:
        say("impossible", problem)
        return
    settings.DATABASES["silent"] = settings.DATABASES["postgres"] | {"HOST": "db.angee.test"}
    settings.ANGEE_JOBS_LOCKS["silent"] = {
        "BACKEND": f"angee_jobs.locks.{backend}",
        "OPTIONS": {"alias": "silent"},
    }
    longest, over = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        last = time.monotonic()
        while not over.wait(0.01):
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    ticking = threading.Thread(target=tick)
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
