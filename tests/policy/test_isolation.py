"""A backend that hangs or is slow costs no hold at another one, and no caller more than its timeout."""

import contextlib
import logging
import threading
import time

import pytest
from django.db import transaction
from django.test import override_settings

from angee_jobs.locks import LocalLockBackend, LockBackendError, clock, lock, lock_backends
from angee_jobs.locks.lock import Lock
from angee_jobs.locks.renewal import renewer
from tests.support.servers import eventually


class Slow(LocalLockBackend):
    """Each release takes this long, and each renewal; a release that cannot be done in time is an error."""

    seconds = 0.0

    def _wait(self, deadline):
        time.sleep(max(0.0, min(self.seconds, deadline - clock.now())))
        if self.seconds > 4:
            raise LockBackendError("no answer in time", uncertain=True)

    def release(self, name, owner, deadline):
        self._wait(deadline)
        return super().release(name, owner, deadline)


LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"},
    **{f"slow{number}": {"BACKEND": f"{__name__}.Slow"} for number in range(3)},
}


@pytest.fixture(autouse=True)
def backends():
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS):
        slow = [lock_backends[f"slow{number}"] for number in range(3)]
        yield slow
        for each in slow:
            each.seconds = 0.0
        eventually(lambda: not renewer._abandoned, 15)


def test_releases_after_a_rollback_at_hung_backends_cost_no_lease_elsewhere(backends):
    """Seen: each was waited for on the one thread, for up to 5 s, and a lease of 3 s elsewhere was lost."""
    with lock("kept", ttl=2.4) as kept:
        stack = []
        with contextlib.suppress(ZeroDivisionError), transaction.atomic():
            for number, backend in enumerate(backends):
                stack.append(lock("dropped", backend=f"slow{number}"))
                stack[-1].__enter__()
                stack[-1].__exit__(None, None, None)  # kept for the transaction
                backend.seconds = 10.0
            raise ZeroDivisionError
        end = clock.now() + 6
        while clock.now() < end:
            started = clock.now()
            assert kept.held
            assert not lock("kept").acquire()
            assert lock("other", timeout=0.3).acquire()
            assert clock.now() - started < 1.5, "another caller waited for the hung backend"
            time.sleep(0.1)


def test_many_dropped_locks_at_a_slow_backend_cost_no_lease_there_or_elsewhere(backends):
    """Seen: with 100 of them at 0.2 s each, a lease of 30 s was lost."""
    slow = backends[0]
    with lock("kept", ttl=2.4) as kept, Lock("its own", ttl=2.4, backend=slow) as own:
        dropped = [Lock(f"dropped-{number}", ttl=60, backend=slow) for number in range(40)]
        for each in dropped:
            assert each.acquire()
        slow.seconds = 0.2
        del each
        dropped.clear()
        end = clock.now() + 6
        while clock.now() < end:
            assert kept.held
            assert own.held
            time.sleep(0.05)
        slow.seconds = 0.0


class Failing(LocalLockBackend):
    fails = False

    def extend(self, extensions, deadline):
        if self.fails:
            raise LockBackendError("the server is away")
        return super().extend(extensions, deadline)


def test_an_outage_is_a_line_for_each_try_and_one_when_it_is_over(caplog):
    """Seen: two tracebacks for each try."""
    caplog.set_level(logging.INFO, "angee_jobs.locks")
    backend = Failing()
    with Lock("kept", ttl=3, backend=backend) as held:
        backend.fails = True
        eventually(lambda: "failed: the server is away" in caplog.text, 10)
        backend.fails = False
        eventually(lambda: "can be renewed again" in caplog.text, 10)
        assert held.held
    assert "Traceback" not in caplog.text


def test_one_backend_has_one_thread(backends):
    with lock("alone", ttl=0.9):
        time.sleep(1)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("angee-locks-renewal") == 1
        assert "angee-locks-renewal-own" not in names
