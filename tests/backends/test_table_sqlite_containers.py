"""The lock file on SQLite across containers: one clock for all, and one file for all who use a database, or none."""

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from angee_jobs.locks import LockBackendError, TableLockBackend
from angee_jobs.locks.backends.table import sqlite_place, sqlite_sql
from tests.support.pg_helpers import alias_with, within

ROOT = Path(__file__).parents[2]
NAME = "angee:name:boxed"


class Box:
    """A process of `tests.support.children.sqlite_box`, after a shell has set up what it finds around it."""

    def __init__(self, database, prepare="true", *flags):
        command = [sys.executable, "-m", "tests.support.children.sqlite_box", str(database)]
        if prepare != "true" or flags:
            shell = f'{prepare} && exec "$@"'
            command = ["unshare", "-m", "--propagation", "private", *flags, "sh", "-c", shell, "sh", *command]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()

    def ask(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().rstrip("\n")


def can(*flags):
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["unshare", "-m", *flags, "true"], check=True, capture_output=True, timeout=10)
        return True
    return False


needs_mounts = pytest.mark.skipif(not can(), reason="needs the right to mount")

#: How a container differs from its host, in what a process finds around it.
BOXES = {
    "another boot id": ("cat /proc/sys/kernel/random/uuid > {tmp}/id && mount --bind {tmp}/id {boot_id}",),
    "no /proc": ("mount -t tmpfs tmpfs /proc",),
    "a /proc with processes alone": ("mount -t proc -o subset=pid proc /proc",),
    "a boot an hour later": ("true", "--time", "--boottime", "3600", "--fork", "--kill-child"),
    "a boot an hour earlier": ("true", "--time", "--boottime", "-300", "--fork", "--kill-child"),
}


def box(what, database, tmp_path):
    prepare, *flags = BOXES[what]
    if flags and not can(*flags):
        pytest.skip("needs time namespaces")
    prepare = prepare.format(tmp=tmp_path, boot_id="/proc/sys/kernel/random/boot_id")
    return Box(database, prepare, *flags)


@needs_mounts
@pytest.mark.parametrize("what", BOXES)
def test_containers_exclude_each_other(what, tmp_path):
    """Each counted what the other held as expired, or as left by an earlier boot."""
    database = tmp_path / "db.sqlite3"
    with Box(database) as host, box(what, database, tmp_path) as boxed:
        for one, other in ((host, boxed), (boxed, host)):
            assert one.ask("acquire") == "acquired True"
            assert other.ask("acquire") == "acquired False"
            assert one.ask("release") == "released True"


@needs_mounts
def test_a_database_that_is_mounted_without_its_folder_is_refused(tmp_path):
    (tmp_path / "host").mkdir()
    (tmp_path / "box").mkdir()
    database, mounted = tmp_path / "host" / "db.sqlite3", tmp_path / "box" / "db.sqlite3"
    for file in (database, mounted):
        file.touch()
    with Box(database) as host, Box(mounted, f"mount --bind {database} {mounted}") as boxed:
        assert host.ask("acquire") == "acquired True"
        assert "Mount the folder instead" in boxed.ask("acquire")
        assert "angee_jobs.E030" in boxed.ask("check")
        assert "angee_jobs.E030" not in host.ask("check")


@needs_mounts
def test_a_folder_that_is_mounted_twice_has_one_lock_file(tmp_path):
    (tmp_path / "host").mkdir()
    (tmp_path / "box").mkdir()
    inside = tmp_path / "box" / "db.sqlite3"
    with Box(tmp_path / "host" / "db.sqlite3") as host:
        with Box(inside, f"mount --bind {tmp_path}/host {tmp_path}/box") as boxed:
            assert host.ask("acquire") == "acquired True"
            assert boxed.ask("acquire") == "acquired False"


@pytest.fixture
def make():
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def backend(name):
            aliased = alias_with(f"place-{next(numbers)}", "default", NAME=str(name))
            made = TableLockBackend(alias=stack.enter_context(aliased))
            stack.callback(made.close)
            return made

        yield backend


def test_a_database_with_two_names_is_refused_at_both(make, tmp_path):
    first, second = tmp_path / "one.sqlite3", tmp_path / "two.sqlite3"
    first.touch()
    os.link(first, second)
    for path in (first, second):
        backend = make(path)
        with pytest.raises(LockBackendError, match="has 2 names"):
            backend.acquire(NAME, "owner", 30, "{}", within())
        assert [problem.id for problem in backend.check()] == ["angee_jobs.E030"]
    os.unlink(second)
    assert make(first).acquire(NAME, "owner", 30, "{}", within())


def test_a_database_is_the_same_by_a_link_an_address_and_in_every_spelling(make, tmp_path):
    database = tmp_path / "with space.sqlite3"
    database.touch()
    (tmp_path / "link.sqlite3").symlink_to(database)
    quoted = str(database).replace(" ", "%20")
    names = [
        database,
        tmp_path / "link.sqlite3",
        f"file:{quoted}",
        f"file://{quoted}?mode=rwc",
        f"file://localhost{quoted}",
    ]
    assert {make(name).path() for name in names} == {f"{database}.locks"}


@pytest.mark.parametrize("name", [":memory:", "file:x?mode=memory&cache=shared", "file:/x?vfs=memdb"])
def test_a_database_in_memory_has_no_file(name, make):
    assert make(name).path() == "" and not make(name).cross_process and make(name).check() == []


def test_what_an_earlier_boot_left_is_over(make, tmp_path, monkeypatch):
    """It was renewed at a time that is yet to come. The id of the boot only says that a look is due."""
    backend = make(tmp_path / "db.sqlite3")
    real = sqlite_sql.machine_clock()
    monkeypatch.setattr(sqlite_sql, "now", lambda: real() + 5000)
    assert backend.acquire(NAME, "owner", 30, "{}", within())
    backend.close()
    monkeypatch.setattr(sqlite_sql, "now", real)
    assert backend.inspect(NAME, within()), "in the very boot it stays"
    for boot in ("another", ""):
        backend.close()
        monkeypatch.setattr(sqlite_sql, "_boot", lambda boot=boot: boot)
        assert backend.inspect(NAME, within()) is None
        monkeypatch.setattr(sqlite_sql, "now", lambda: real() + 5000)
        assert backend.acquire(NAME, "owner", 30, "{}", within())
        monkeypatch.setattr(sqlite_sql, "now", real)


MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:40 / /srv/my\\040data rw - nfs4 server:/data rw
31 27 0:41 / /srv/my\\040data/local rw - xfs /dev/vdb rw
32 27 0:42 / /cover rw - cifs //server/x rw
33 27 0:43 / /cover rw - ext4 /dev/vdc rw
34 27 0:44 / /fuse rw shared:1 - fuse.sshfs host:/ rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/srv/db.sqlite3.locks", None),
        ("/srv/my data/db.sqlite3.locks", "nfs4"),
        ("/srv/my data/deep/er/db.sqlite3.locks", "nfs4"),
        ("/srv/my data/local/db.sqlite3.locks", None),
        ("/cover/db.sqlite3.locks", None),
        ("/fuse/db.sqlite3.locks", "fuse.sshfs"),
        ("/fuse2/db.sqlite3.locks", None),
    ],
)
def test_a_network_file_system_is_a_warning(path, expected, tmp_path, make, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    assert sqlite_place.network_file_system(path, str(table)) == expected
    monkeypatch.setattr(sqlite_place, "network_file_system", lambda path: expected)
    ids = [problem.id for problem in make(tmp_path / "db.sqlite3").check()]
    assert ids == (["angee_jobs.W030"] if expected else [])


@needs_mounts
def test_a_folder_that_cannot_be_written_is_a_warning_and_named(tmp_path):
    (tmp_path / "db.sqlite3").touch()
    read_only = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    with Box(tmp_path / "db.sqlite3", read_only) as boxed:
        assert "angee_jobs.W031" in boxed.ask("check")
        answer = boxed.ask("acquire")
        assert f"the folder {tmp_path} must be writable" in answer
