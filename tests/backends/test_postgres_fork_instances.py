"""A backend instance that is kept over a fork begins anew in the child, whatever the parent's threads were doing.

Also where Python is not told of the fork, as when a server forks in C after it has imported the application.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import threading

import pytest

from angee_jobs.locks import process
from angee_jobs.locks.backends.advisory.backend import PostgresAdvisoryLockBackend
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.errors import LockBackendError
from tests.support.pg_helpers import in_production, within
from tests.support.servers import eventually

__all__ = ["in_production"]

NAME = "angee:name:forked"
_owners = map("owner{}".format, itertools.count())

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(params=[TableLockBackend, PostgresAdvisoryLockBackend])
def backend(request, postgres, in_production):
    backend = request.param(alias="postgres")
    yield backend
    backend.stop_watching()
    for slot in (backend._session.pool if request.param is PostgresAdvisoryLockBackend else backend._pool).slots:
        slot.drop()


def acquire(backend, name=NAME):
    owner = next(_owners)
    return owner, backend.acquire(name, owner, 30.0, "{}", within())


def child_result(fork, work):
    """What ``work`` returns in a child that ``fork`` makes."""
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # should it hang
            process.check()  # as every entry point does
            os.write(write, repr(work()).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read, "rb") as answer:
        return answer.read().decode()


@pytest.mark.parametrize("fork", [os.fork, lambda: ctypes.PyDLL(None).fork()], ids=["Python", "C"])
def test_a_kept_instance_works_in_the_child(backend, fork):
    owner, grant = acquire(backend)
    assert grant
    stop = threading.Event()

    def use(number):
        while not stop.is_set():
            with contextlib.suppress(LockBackendError):
                name = f"{NAME}{number}"
                mine, granted = acquire(backend, name)
                if granted:
                    backend.release(name, mine, within())
                backend.remaining(NAME, within())

    def listen():
        while not stop.is_set():
            with contextlib.suppress(LockBackendError):
                backend.wait_for_change(0.05)

    def child():
        refused = acquire(backend)[1] is None
        mine, granted = acquire(backend, "angee:name:child")
        backend.remaining(NAME, within())
        backend.wait_for_change(0.01)
        told = backend.wait_for_change(0.01)
        backend.stop_watching()
        alive = list(backend.extend([Extension("angee:name:child", mine, 30)], within())) == [mine]
        return refused, granted is not None, list(told), alive, backend.release("angee:name:child", mine, within())

    threads = [threading.Thread(target=use, args=[number], daemon=True) for number in range(3)]
    threads.append(threading.Thread(target=listen, daemon=True))
    if fork is not os.fork:  # an interpreter that is not told of a fork survives none beside running threads
        backend.remaining(NAME, within())
        backend.wait_for_change(0.01)
        threads = []
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            assert child_result(fork, child) == "(True, True, [], True, True)"
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    assert list(backend.extend([Extension(NAME, owner, 30)], within())) == [owner]
    assert backend.release(NAME, owner, within())
    eventually(lambda: backend.inspect("angee:name:child", within()) is None)
