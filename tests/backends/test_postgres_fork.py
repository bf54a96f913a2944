"""A forked child has sessions of its own."""

import os

import pytest

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
