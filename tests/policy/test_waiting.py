"""Waiting: a try that the end of the wait cuts off.

The model-based tests found it; this is the small, deterministic form.
"""

from __future__ import annotations

import time
from typing import Any

from django.test import override_settings

from angee_jobs.locks import LocalLockBackend, LockBackendError, clock, lock, lock_backends
from tests.support.servers import eventually


class AnswersTooLate(LocalLockBackend):
    """Refuses the first try. The second one is granted, but its answer comes after the end of the wait."""

    tries = 0

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Any:
        self.tries += 1
        if self.tries == 1:
            return None
        grant = super().acquire(name, owner, ttl, holder, deadline)
        time.sleep(max(0.0, deadline - clock.now()))
        raise LockBackendError("no answer in time", name=name, uncertain=grant is not None)


def test_a_try_that_the_end_of_the_wait_cuts_off_leaves_no_hold() -> None:
    """It counted as refused and nobody took it back, so that the lock stayed taken until the end of its lease."""
    settings = {"default": {"BACKEND": f"{__name__}.AnswersTooLate"}}
    with override_settings(ANGEE_JOBS_LOCKS=settings):
        backend: Any = lock_backends.verbs("default")
        assert not lock("cut off", ttl=600).acquire(timeout=0.1)
        assert backend.tries == 2
        eventually(lambda: not backend.is_held("cut off"), what="the late grant is taken back")
