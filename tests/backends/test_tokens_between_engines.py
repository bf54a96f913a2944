"""A key that moves to another backend, by a change of the setting, gets a higher fencing token there."""

import itertools

import pytest
from django.db import transaction

from angee_jobs.locks import lock
from tests.conftest import LOCK_BACKENDS
from tests.support.pg_helpers import in_production

__all__ = ["in_production"]

#: Within one process also the local backend.
PAIRS = list(itertools.permutations(LOCK_BACKENDS, 2))


@pytest.mark.parametrize(("earlier", "later"), PAIRS, ids=map("-".join, PAIRS))
def test_the_token_goes_up_and_the_guard_lets_it_pass(earlier, later, request, postgres, in_production):
    for server in {LOCK_BACKENDS[earlier], LOCK_BACKENDS[later]} - {None}:
        request.getfixturevalue(server)
    last = 0
    for turn in range(6):
        for _ in range(3):
            with lock(f"moved-{earlier}-{later}", backend=(earlier, later)[turn % 2]) as held:
                assert held.fencing_token > last
                last = held.fencing_token
        with lock(f"moved-{earlier}-{later}", backend=(earlier, later)[turn % 2]) as held:
            with transaction.atomic(using="postgres"), held.guard(using="postgres"):
                last = held.fencing_token
