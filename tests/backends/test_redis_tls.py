"""The Redis backend over TLS, with a certificate that is verified."""

from __future__ import annotations

import shlex
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from angee_jobs.locks import LockBackendError, lock
from angee_jobs.locks.clock import now
from tests.support.redis_tools import DJANGO, DJANGO_REDIS, backend_for, new_name, new_owner, soon
from tests.support.servers import RedisServer, eventually, free_port, missing_packages, require

missing = missing_packages("redis", "django_redis")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


@pytest.fixture
def certificate(server_dir: Path) -> Path:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs the program openssl")
    what = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([program, *shlex.split(what), *names], cwd=server_dir, capture_output=True, timeout=30, check=True)
    return server_dir


@pytest.fixture
def tls(certificate: Path) -> Iterator[tuple[RedisServer, str]]:
    require(RedisServer.unavailable())
    port = free_port()
    options = {
        "tls-port": port,
        "tls-cert-file": certificate / "cert.pem",
        "tls-key-file": certificate / "key.pem",
        "tls-ca-cert-file": certificate / "cert.pem",
        "tls-auth-clients": "no",
    }
    with RedisServer(certificate / "r", options=options) as server:
        yield server, f"rediss://127.0.0.1:{port}/0"


def cache(kind: str, location: str, certificate: Path) -> dict[str, Any]:
    verified = {"ssl_ca_certs": str(certificate / "cert.pem")}
    options = {"CONNECTION_POOL_KWARGS": verified} if kind == DJANGO_REDIS else verified
    return {"BACKEND": kind, "LOCATION": location, "OPTIONS": options}


@pytest.mark.parametrize("kind", [DJANGO, DJANGO_REDIS])
def test_the_verbs_over_tls(tls, certificate, kind):
    server, location = tls
    with backend_for(cache(kind, location, certificate)) as backend:
        owners = {new_name(): new_owner() for _ in range(700)}
        for name, owner in owners.items():
            assert backend.acquire(name, owner, 30, "x" * 500, soon())
        # Answers of many records of TLS, which arrive in pieces.
        assert sorted(record.name for record in backend.list_held(soon())) == sorted(owners)
        for name, owner in owners.items():
            assert backend.release(name, owner, soon())
        assert len(backend.connections._idle) == 1
        name, owner = new_name(), new_owner()
        assert backend.acquire(name, owner, 30, "x" * 3_000_000, soon())  # more than a socket takes at once
        record = backend.inspect(name, soon())
        assert record is not None
        assert record.holder == "x" * 3_000_000
        with server.hanging():
            started = now()
            with pytest.raises(LockBackendError):
                backend.acquire(new_name(), new_owner(), 30, "", soon(0.3))
            assert now() - started < 0.3 + 2


def test_a_waiter_is_woken_over_tls(tls, certificate):
    _, location = tls
    with backend_for(cache(DJANGO, location, certificate)) as backend:
        delays = []
        for _ in range(5):
            owner = new_owner()
            assert backend.acquire("angee:name:tls", owner, 60, "", soon())
            times: list[float] = []

            def wait(times: list[float] = times) -> None:
                with lock("tls", timeout=10, backend="temporary"):
                    times.append(now())

            thread = threading.Thread(target=wait)
            thread.start()
            eventually(lambda: backend.watcher._subscribed.get("angee:name:tls"), 10)
            started = now()
            assert backend.release("angee:name:tls", owner, soon())
            thread.join(10)
            delays.append(times[0] - started)
            eventually(lambda: backend.watcher._connection is None, what="the subscription of this wait is over")
        assert statistics.median(delays) < 0.5


def test_a_certificate_that_nobody_vouches_for(tls):
    _, location = tls
    with backend_for({"BACKEND": DJANGO, "LOCATION": location}) as backend:
        with pytest.raises(LockBackendError, match="certificate"):
            backend.acquire(new_name(), new_owner(), 30, "", soon())
