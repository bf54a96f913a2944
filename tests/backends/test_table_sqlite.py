"""The lock file on SQLite: what may stand in its place, and what may become of its disk."""

import contextlib
import itertools
import os
import sqlite3
import sys

import pytest

from angee_jobs.locks import LockBackendError, TableLockBackend
from tests.support.pg_helpers import alias_with, within

NAME = "angee:name:billing"


@pytest.fixture
def make(tmp_path):
    """A backend beside a database file of that name, which is in a folder of the test's own if it names none."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def backend(name="project.sqlite3"):
            aliased = alias_with(f"file-{next(numbers)}", "default", NAME=str(tmp_path / name))
            made = TableLockBackend(alias=stack.enter_context(aliased))
            stack.callback(made.close)
            return made

        yield backend


def acquire(backend, name=NAME, note="{}"):
    return backend.acquire(name, "owner", 30.0, note, within())


def refused(backend, **options):
    """The error, which names the file; nothing is taken."""
    with pytest.raises(LockBackendError) as caught:
        acquire(backend, **options)
    assert backend.path() in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "content", [b"\0" * 8192, b"not a database, but somebody's notes\n" * 400], ids=["zeros", "text"]
)
def test_a_damaged_file_is_named_and_left_as_it_is(make, content):
    backend = make()
    with open(backend.path(), "wb") as file:
        file.write(content)
    assert "delete it together with its -wal and -shm" in str(refused(backend))
    with open(backend.path(), "rb") as file:
        assert file.read() == content
    os.unlink(backend.path())
    assert acquire(backend), "it is made anew"


def test_a_file_that_is_damaged_while_it_is_used_is_named(make):
    backend = make()
    for number in range(200):
        assert acquire(backend, f"angee:name:{number}")
    backend.file.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    backend.close()
    with open(backend.path(), "r+b") as file:
        file.seek(2048)
        file.write(b"\xff" * 60_000)
    refused(backend)


def test_a_file_that_is_removed_while_it_is_used_is_made_anew_for_everybody(make):
    backend, other = make(), make()
    assert acquire(backend) and not acquire(other)
    for suffix in ("", "-wal", "-shm"):
        os.unlink(backend.path() + suffix)
    assert acquire(other), "whoever removes the file frees all locks"
    assert not acquire(backend), "both see the new file"


def test_a_file_that_comes_back_while_another_is_made_is_the_one_in_use(make, monkeypatch):
    """The lock file was away for a moment. Who took the new one for it would have holders whom nobody else sees."""
    backend, other = make(), make()
    assert acquire(other)
    other.file.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    path = backend.path()
    os.rename(path, path + ".away")
    real = backend.file._prepare

    def prepare(*args):
        real(*args)
        if os.path.exists(path + ".away"):
            os.unlink(path + "-wal")
            os.unlink(path + "-shm")
            os.rename(path + ".away", path)

    monkeypatch.setattr(backend.file, "_prepare", prepare)
    assert not acquire(backend)
    assert backend.force_release(NAME, within())
    assert acquire(other)


def test_a_database_of_somebody_else_is_named_and_left_as_it_is(make):
    backend = make()
    stranger = sqlite3.connect(backend.path())
    stranger.execute("CREATE TABLE lock (name TEXT)")
    stranger.commit()
    assert "move it away" in str(refused(backend))
    assert stranger.execute("SELECT name FROM sqlite_schema").fetchall() == [("lock",)]
    stranger.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder where not even root can write")
def test_a_folder_that_cannot_be_written_to_is_named(make):
    assert isinstance(refused(make("/proc/self/project.sqlite3")).__cause__, sqlite3.OperationalError)


def test_a_full_disk_is_named_and_ends(make):
    """SQLite's own limit stands for that of the disk: the error is the same."""
    backend = make()
    assert acquire(backend, "angee:name:before")
    connection = backend.file.connection()
    [pages] = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    error = refused(backend, note="x" * 100_000)
    assert error.__cause__.sqlite_errorcode == sqlite3.SQLITE_FULL
    assert backend.inspect(NAME, within()) is None
    assert backend.inspect("angee:name:before", within()) is not None
    assert backend.release("angee:name:before", "owner", within())
    assert acquire(backend, note="x" * 100_000), "there is room again"
