"""An exception of a signal handler at every instruction of every operation: the file stays usable for everybody.

Struck between BEGIN and COMMIT, a process went on inside of its open transaction: all others got "database is locked",
and what it granted and extended meanwhile was rolled back later, while its holder believed in it.
"""

import concurrent.futures
import contextlib
import dis
import sqlite3
import sys

import pytest

from angee_jobs.locks import LockBackendError, TableLockBackend
from angee_jobs.locks.backends import table
from angee_jobs.locks.backends.base import Extension
from tests.support.pg_helpers import alias_with, within

FOLDER = table.__path__[0]
NAME = "angee:name:struck"


class Struck(Exception):
    pass


def strike(number, operation):
    """Run it with the exception at its ``number``-th point; whether there are that many.

    The interpreter looks for signals where a function begins, where a loop jumps back, and when a call of a function
    in C returns, as part of that call.
    """
    left = number

    def here():
        nonlocal left
        left -= 1
        if left == 0:
            raise Struck

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("RESUME", "JUMP_BACK")):
            here()
        return trace

    def profile(frame, event, arg):
        if event == "c_return" and frame.f_code.co_filename.startswith(FOLDER):
            here()

    old = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        operation()
    except Struck:
        return True
    finally:
        sys.settrace(old[0])
        sys.setprofile(old[1])
    return left <= 0


@pytest.fixture
def backends(tmp_path):
    """Two with connections of their own would be two processes; the other one is asked as a stranger."""
    with alias_with("struck", "default", NAME=str(tmp_path / "db.sqlite3")) as alias:
        backend = TableLockBackend(alias=alias)
        assert backend.acquire("angee:name:first", "owner", 30, "{}", within())
        stranger = sqlite3.connect(backend.path(), timeout=0, isolation_level=None)
        yield backend, stranger
        stranger.close()
        backend.close()


def opened(backend):
    backend.close()
    backend.inspect(NAME, within())


OPERATIONS = {
    "acquire": lambda backend: backend.acquire(NAME, "owner", 30, "{}", within()),
    "extend": lambda backend: backend.extend([Extension(NAME, "mine", 30)], within()),
    "release": lambda backend: backend.release(NAME, "mine", within()),
    "release and tidy up": lambda backend: (
        setattr(backend, "_until_tidy", 1),
        backend.release(NAME, "mine", within()),
    ),
    "adopt": lambda backend: backend.adopt(NAME, "mine", "new", 30, "{}", within()),
    "inspect": lambda backend: backend.inspect(NAME, within()),
    "inspect_many": lambda backend: backend.inspect_many([NAME], within()),
    "list_held": lambda backend: list(backend.list_held(within())),
    "scan_held": lambda backend: list(backend.scan_held(["holder"], within())),
    "list_expired": lambda backend: list(backend.list_expired(0, within())),
    "reap": lambda backend: backend.reap(0, 1000, within()),
    "force_release": lambda backend: backend.force_release(NAME, within()),
    "remaining": lambda backend: backend.remaining(NAME, within()),
    "wait_for_change": lambda backend: backend.wait_for_change(0.0001),
    "close": lambda backend: backend.close(),
    "open": opened,
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_a_strike_anywhere_leaves_the_file_usable(what, backends):
    backend, stranger = backends
    operation = OPERATIONS[what]
    points = 0
    while True:
        if what != "acquire":
            assert backend.acquire(NAME, "mine", 30, "{}", within())
        if not strike(points + 1, lambda: operation(backend)):
            break
        points += 1
        stranger.execute("BEGIN IMMEDIATE")  # at once: nobody is in a transaction
        [(seen,)] = stranger.execute("SELECT count(*) FROM lock WHERE owner <> ''").fetchall()
        stranger.execute("ROLLBACK")
        assert seen == len(list(backend.list_held(within()))), "others see what this process believes"
        with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:
            assert elsewhere.submit(backend.inspect, "angee:name:first", within(2)).result(10), "another thread can"
        for owner in ("owner", "mine", "new"):
            with contextlib.suppress(LockBackendError):
                backend.release(NAME, owner, within())
        assert backend.inspect(NAME, within()) is None
    assert points
