"""The lock file on SQLite: what may stand in its place, and what may become of its disk."""

import contextlib
import itertools
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from angee_jobs.locks import (
    LockBackendError,
    LockLostError,
    TableLockBackend,
    clock,
    get_lock_backend,
    lock,
    task_lock_is_held,
)
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.backends.table import sqlite_file
from tests.support.pg_helpers import alias_with, within
from tests.support.servers import eventually

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


LOOK = """
import sqlite3, sys, time
[(expires,)] = sqlite3.connect(sys.argv[1]).execute("SELECT expires FROM lock WHERE name = ?", [sys.argv[2]])
print(expires - time.clock_gettime(time.CLOCK_BOOTTIME))
"""
CLOSE_AS_THE_LAST_ONE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT count(*) FROM lock").fetchall()
connection.close()
"""


def stranger(script, *args):
    """What another process says."""
    return subprocess.run(
        [sys.executable, "-c", script, *args], check=True, timeout=30, capture_output=True, text=True
    ).stdout


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="needs the clock")
def test_a_log_that_was_deleted_behind_our_back_is_noticed_at_the_next_request(make):
    """Whoever closes a file that it has read frees its own locks on it, and the next one to end deletes the log.

    What was written into the deleted log nobody else saw: another acquired what this process held and extended.
    """
    backend = make()
    assert backend.acquire(NAME, "owner", 10.0, "{}", within())
    for ttl in (30.0, 60.0, 90.0):
        for suffix in ("", "-wal", "-shm"):
            with open(backend.path() + suffix, "rb") as file:  # a backup
                file.read()
        stranger(CLOSE_AS_THE_LAST_ONE, backend.path())
        assert not os.path.exists(backend.path() + "-wal"), "it took itself for the last one"
        assert backend.extend([Extension(NAME, "owner", ttl)], within())
        assert float(stranger(LOOK, backend.path(), NAME)) > ttl - 9, "others see the extension"


@pytest.mark.skipif(not hasattr(sqlite3.Connection, "setconfig"), reason="needs Python 3.12")
def test_who_closes_the_file_last_leaves_the_log(make):
    backend = make()
    assert acquire(backend)
    backend.close()
    assert os.path.exists(backend.path() + "-wal") and os.path.exists(backend.path() + "-shm")
    assert not acquire(backend)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
@pytest.mark.parametrize("settled", [True, False])
def test_each_of_the_three_files_is_looked_at(suffix, how, settled, make, monkeypatch):
    backend = make()
    assert acquire(backend)
    path = backend.path() + suffix
    if settled:  # as if nothing had changed in the folder for a while, so that its time is trusted
        monkeypatch.setattr(sqlite_file, "SETTLED_FINE", -1.0)
        monkeypatch.setattr(sqlite_file, "SETTLED", -1.0)
        time.sleep(0.02)  # longer than a file system's clock stands still
        assert not acquire(backend)
        assert backend.file._settled
    if how == "replaced":
        shutil.copyfile(path, path + ".copy")
        os.replace(path + ".copy", path)
    else:
        os.rename(path, path + ".away")
        if how == "deleted":
            os.unlink(path + ".away")
    assert not backend.file._in_place()


@pytest.mark.parametrize(("nanoseconds", "settles"), [(123_456_789, 0.5), (0, 3.0), (420_000_000, 3.0)])
def test_the_time_of_a_folder_is_trusted_when_it_has_stayed_for_a_while(nanoseconds, settles, make, monkeypatch):
    """By the local clock: a wall clock that was set an hour ahead trusted what had changed just now.

    Half a second is enough where times are finer than milliseconds. Three are long: the looks at three files instead of
    one folder are a third of what a block takes, and the database's own journal changes the folder with each commit.
    """
    at = 100.0
    backend = make()
    assert acquire(backend)
    file, folder = backend.file, os.path.dirname(backend.path())
    monkeypatch.setattr(sqlite_file, "clock", types.SimpleNamespace(now=lambda: at))
    monkeypatch.setattr(time, "time", lambda: 4e9)
    os.utime(folder, ns=(0, 1_700_000_000_000_000_000 + nanoseconds))

    def settled_after(seconds):
        nonlocal at
        at += seconds
        assert file._in_place()
        return file._settled

    assert [settled_after(seconds) for seconds in (0.0, settles - 0.1, 0.2, 0.0)] == [False, False, True, True]
    os.utime(folder, ns=(0, 1_700_000_001_000_000_000 + nanoseconds))  # what any new file does
    assert [settled_after(seconds) for seconds in (9.0, settles - 0.1, 0.2)] == [False, False, True]


def test_tokens_rise_over_files_that_were_deleted_or_put_back_from_a_copy(make, tmp_path):
    backend = make()
    tokens = [acquire(backend).fencing_token]
    backend.close()
    copies = {suffix: (tmp_path / f"copy{suffix}") for suffix in ("", "-wal", "-shm")}
    for suffix, copy in copies.items():
        with contextlib.suppress(FileNotFoundError):  # Python 3.11: the last to close takes the log away
            shutil.copyfile(backend.path() + suffix, copy)
    for _ in range(3):
        for suffix in copies:
            Path(backend.path() + suffix).unlink(missing_ok=True)
        tokens.append(acquire(backend).fencing_token)
        assert backend.release(NAME, "owner", within())
        tokens.append(acquire(backend).fencing_token)
        backend.close()
        for suffix, copy in copies.items():
            Path(backend.path() + suffix).unlink(missing_ok=True)
            if copy.exists():
                shutil.copyfile(copy, backend.path() + suffix)
        assert backend.force_release(NAME, within())
        tokens.append(acquire(backend).fencing_token)
    assert tokens == sorted(set(tokens))


def test_rows_that_were_deleted_by_hand_leave_the_floor_for_new_tokens(make):
    backend = make()
    high = acquire(backend).fencing_token + 10**12
    execute = backend.file.connection().execute
    execute("UPDATE lock SET fencing_token = ?", [high])
    execute("DELETE FROM lock")
    assert acquire(backend).fencing_token == high + 1
    execute("UPDATE lock SET fencing_token = ?", [2**63 - 1])
    execute("DELETE FROM lock")
    assert acquire(backend).fencing_token == high + 1, "one that nobody can exceed is not the floor of all others"


def test_tidying_up_fails_no_release_and_makes_none_wait(make, monkeypatch):
    backend, deadlines = make(), []

    def fail(statement, age, limit, deadline):
        deadlines.append(deadline)
        raise LockBackendError("no")

    monkeypatch.setattr(backend, "_remove", fail)
    monkeypatch.setattr(backend, "_until_tidy", 1)
    assert acquire(backend)
    assert backend.release(NAME, "owner", within()) is True
    assert len(deadlines) == 1 and deadlines[0] <= clock.now(), "it is tried once"
    assert acquire(backend)


def test_two_aliases_share_a_connection_and_hear_of_each_others_releases(make):
    one, two = make(), make()
    assert one.file is two.file
    assert acquire(one)
    two.wait_for_change(0.05)
    assert two.wait_for_change(0.05) == ()
    assert one.release(NAME, "owner", within())
    assert two.wait_for_change(5.0) is None


@pytest.fixture
def warm_file():
    backend = get_lock_backend("sqlite")
    with lock("warm", backend="sqlite"):
        pass
    return backend.path()


def test_a_lock_file_that_was_deleted_holds_nothing_any_more(warm_file):
    kept = lock("deleted", backend="sqlite", ttl=60)
    assert kept.acquire()
    for suffix in ("", "-wal", "-shm"):
        os.unlink(warm_file + suffix)
    with lock("deleted", backend="sqlite") as other:  # as another process would find it
        assert other.held
        assert not kept.extend()
        assert kept.lost
        assert not kept.release()
        assert task_lock_is_held("deleted", backend="sqlite")


def test_a_deleted_lock_file_is_a_loss_of_the_block(warm_file):
    with pytest.raises(LockLostError), lock("block", backend="sqlite", ttl=1.5) as held:
        os.unlink(warm_file)
        eventually(lambda: held.lost, 5)
