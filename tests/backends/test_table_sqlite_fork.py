"""The lock file on SQLite across forks: none inherits an open file, or gives up what could not be closed before."""

import contextlib
import ctypes
import os
import sqlite3
import threading
import time

import pytest

from angee_jobs.locks import LocalLockBackend, LockBackendError, TableLockBackend, clock, process
from angee_jobs.locks.backends.table import sqlite_file
from tests.support.forks import Forked
from tests.support.pg_helpers import alias_with, within
from tests.support.servers import eventually

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
NAME = "angee:name:forked"


@pytest.fixture
def backend(tmp_path):
    with alias_with("forked", "default", NAME=str(tmp_path / "db.sqlite3")) as alias:
        made = TableLockBackend(alias=alias)
        yield made
        made.close()


def acquire(backend, name=NAME, owner="owner"):
    return backend.acquire(name, owner, 30.0, "{}", within())


class ForkedInC(Forked):
    """By a server or an extension that does not tell Python."""

    def __init__(self, function):
        real, os.fork = os.fork, ctypes.PyDLL(None).fork
        try:
            super().__init__(function)
        finally:
            os.fork = real


def kernel_locks(path):
    """The files, of the three, on which this very process has locks that others see."""
    inodes = {os.stat(path + side).st_ino: side for side in ("", "-shm")}
    with open("/proc/locks") as locks:
        rows = [line.split() for line in locks]
    return sorted(
        {inodes.get(int(row[5].split(":")[2]), "?") for row in rows if "->" not in row and int(row[4]) == os.getpid()}
        & set(inodes.values())
    )


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="needs /proc/locks")
@pytest.mark.parametrize("fork", [Forked, ForkedInC])
def test_a_child_has_a_connection_and_kernel_locks_of_its_own(fork, backend):
    """A copy made SQLite believe that it had the locks already: the next to end took itself for the last one."""
    assert acquire(backend)

    def child():
        return (
            acquire(backend, owner="child") is None,
            bool(acquire(backend, "angee:name:own", "child")),
            kernel_locks(backend.path()),
        )

    for _ in range(3):
        assert fork(child).result() == (True, True, ["", "-shm"])
        assert backend.release("angee:name:own", "child", within())
    assert kernel_locks(backend.path()) == ["", "-shm"], "the child took none from its parent"
    assert backend.release(NAME, "owner", within())


@pytest.mark.parametrize("fork", [Forked, ForkedInC])
def test_an_open_file_that_was_in_use_is_given_up_in_the_child(fork, backend, monkeypatch):
    """It was used on, and at the parent's next fork its log was deleted under the child."""
    monkeypatch.setattr(sqlite_file, "FORK_SECONDS", 0.1)
    begun, end = threading.Event(), threading.Event()

    def busy(connection, parameters):
        begun.set()
        end.wait(30)

    user = threading.Thread(target=backend.file.run, args=[within(30), busy, ()])
    user.start()
    try:
        assert begun.wait(10)

        def child():
            with pytest.raises(LockBackendError, match="forked while another thread was using it"):
                acquire(backend)
            return "refused"

        assert fork(child).result() == "refused"
    finally:
        end.set()
        user.join(10)
    assert acquire(backend)


def test_a_local_backend_that_is_kept_over_a_fork_is_empty_and_usable_in_the_child():
    backend = LocalLockBackend()
    token = acquire(backend).fencing_token
    taken, end = threading.Event(), threading.Event()

    def keep():
        with backend._mutex:
            taken.set()
            end.wait(30)

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        assert taken.wait(10)

        def child():
            process.check()  # as every entry point does
            return acquire(backend).fencing_token

        for fork in (Forked, ForkedInC):
            assert fork(child).result() > token
    finally:
        end.set()
        keeper.join(10)
    assert acquire(backend) is None


def test_threads_that_fork_at_the_same_time(backend):
    """One thread's end of a fork released what another's had taken, and that mutex was locked for ever."""
    troubles = []

    def work(number):
        try:
            for turn in range(10):
                name = f"angee:name:{number}-{turn}"
                assert Forked(lambda name=name: bool(acquire(backend, name))).result(30)
                assert backend.release(name, "owner", within())
        except BaseException as error:
            troubles.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not troubles
    assert acquire(backend)


@contextlib.contextmanager
def stopped_writer(backend):
    """Another process, in the middle of a transaction."""
    acquire(backend, "angee:name:first")
    stranger = sqlite3.connect(backend.path(), isolation_level=None, check_same_thread=False)
    stranger.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        stranger.execute("ROLLBACK")
        stranger.close()


def test_a_busy_file_costs_ten_threads_no_more_than_their_timeout(backend):
    took = []

    def attempt(number):
        started = clock.now()
        with pytest.raises(LockBackendError, match=r"locked|other requests"):
            backend.acquire(f"angee:name:{number}", "owner", 30.0, "{}", started + 0.3)
        took.append(clock.now() - started)

    with stopped_writer(backend):
        threads = [threading.Thread(target=attempt, args=[number]) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(took) == 10 and max(took) < 0.8, took


def test_a_request_that_does_not_end_costs_the_others_no_more_than_their_timeout(backend):
    begun, end = threading.Event(), threading.Event()

    def stalled(connection, parameters):
        begun.set()
        end.wait(30)

    user = threading.Thread(target=backend.file.run, args=[within(30), stalled, ()])
    user.start()
    try:
        assert begun.wait(10)
        started = time.monotonic()
        with pytest.raises(LockBackendError, match="other requests of this process"):
            backend.acquire(NAME, "owner", 30.0, "{}", clock.now() + 0.2)
        assert time.monotonic() - started < 0.8
    finally:
        end.set()
        user.join(10)
    assert acquire(backend)


def test_a_fork_waits_for_a_busy_file_only_a_moment(backend):
    """With sixteen threads at it the fork went on with an open file."""
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            with contextlib.suppress(LockBackendError):
                backend.acquire("angee:name:busy", "owner", 30.0, "{}", clock.now() + 0.5)

    with stopped_writer(backend):
        threads = [threading.Thread(target=busy) for _ in range(16)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                assert Forked(lambda: backend.file._connection is None and not backend.file._given_up).result(30)
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
    eventually(lambda: acquire(backend), 5)
