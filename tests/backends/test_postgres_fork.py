"""A forked child has sessions of its own."""

import contextlib
import os
import resource
from unittest import mock

import pytest

from angee_jobs.locks import process
from tests.support.forks import Forked
from tests.support.pg_helpers import (
    ECHO,
    in_production,
    pool,
    session,
    within,
)
from tests.support.procs import Child
from tests.support.servers import eventually

__all__ = ["in_production", "pool", "session"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_uses_nor_disturbs_the_session(session, postgres, pool):
    pool.run(ECHO, ["x"], within())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ours = pool.run(ECHO, ["child"], within())[0]
            session.close()
            os.write(write, b"%s %d" % (ours[0], session.open))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"child 0"
    os.close(read)
    os.close(write)
    assert session.execute(ECHO, ["parent"], within())[0][0] == b"parent"
    assert pool.run(ECHO, ["parent"], within())[0][0] == b"parent"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_server_sees_the_parents_death_although_a_child_lives(postgres):
    with Child("pg_fork") as child:
        pid = int(child.expect("session"))
        forked = int(child.expect("forked"))
        assert pid in [session.pid for session in postgres.sessions()]
        child.sigkill()
        eventually(lambda: pid not in [session.pid for session in postgres.sessions()])
        os.kill(forked, 0)  # still there


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("backend", ["postgres_advisory", "postgres_table"])
def test_children_of_a_fork_in_c_exclude_each_other(postgres, backend):
    """As those of uWSGI, which forks without a word to Python: they shared the session, and with it the lock."""
    with Child("pg_fork_in_c", backend) as master:
        inside = None
        done = set()
        while len(done) < 2:
            what, number, *rest = master.line(30).split(maxsplit=2)
            assert what != "failed", rest
            if what == "in":
                assert inside is None
                inside = number
            elif what == "out":
                assert inside == number
                inside = None
            elif what == "parents":
                assert rest == ["1"]
                done.add(number)
        master.send("go on")
        assert master.expect("parent") == "1 1"
        assert master.wait() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_without_a_descriptor_to_spare_lets_go_of_the_socket(session, postgres):
    """What takes the place of the parent's socket needs no descriptor that is not there."""

    def work():
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limit[1]))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        socket = session.fileno()
        session._park()
        return os.readlink(f"/proc/self/fd/{socket}")

    with mock.patch.object(process, "_child_hooks", []):
        child = Forked(work)
    assert child.result() == os.devnull
    assert session.execute(ECHO, ["parent"], within())[0][0] == b"parent"
