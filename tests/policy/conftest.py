"""Fixtures of the tests of the policy."""

import time

import pytest

from angee_jobs.locks import lock_backends


@pytest.fixture
def key(request):
    """A key of the test's own."""
    return f"{request.node.name}-{time.monotonic_ns()}"


@pytest.fixture
def leases(alias):
    """An alias whose holds are leases, and so can leave their process."""
    if not lock_backends.operations(alias).leases:
        pytest.skip("its holds live and die with a connection")
    return alias
