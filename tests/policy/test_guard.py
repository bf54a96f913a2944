"""`guard()`, whichever backend holds the lock."""

import math

from django.db import transaction

from angee_jobs.locks import (
    lock,
)


def test_a_guard_may_wait_for_ever():
    with transaction.atomic(), lock("guarded", backend="local") as held, held.guard(timeout=math.inf):
        pass
