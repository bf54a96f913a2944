"""Where a lock file is: whether all who use the database find the same one, and whether its folder suits it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

SUFFIX = ".locks"
#: The log and its index, which SQLite keeps beside a file.
SIDES = ("", "-wal", "-shm")
#: File systems that several machines may use at once; of those in user space, what comes after "fuse.".
NETWORK = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "ceph", "glusterfs",
    "lustre", "gpfs", "beegfs", "gfs2", "ocfs2", "orangefs", "pvfs2", "9p", "virtiofs", "vboxsf", "prl_fs", "vmhgfs",
    "vmhgfs-fuse", "sshfs", "s3fs", "gcsfuse", "rclone", "davfs", "davfs2", "juicefs", "moosefs", "mfs", "curlftpfs",
    "goofys", "mountpoint-s3", "blobfuse", "blobfuse2",
})  # fmt: skip

Identity = tuple[int, int]


def is_in_memory(database: str) -> bool:
    return ":memory:" in database or "mode=memory" in database or "vfs=memdb" in database


def real_path(database: str) -> str:
    """Of ``DATABASES[...]["NAME"]``: two settings that reach one database by different links share its locks."""
    if database.startswith("file:"):
        database = unquote(urlsplit(database).path)
    return os.path.realpath(database)


def identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def identities(path: str) -> tuple[Identity | None, ...]:
    return tuple(identity(path + side) for side in SIDES)


def trouble(database: str, path: str) -> str | None:
    """Why somebody who uses the same database may find another lock file than ``path``, and what to do about it."""
    for file in (database, path):
        try:
            found = os.stat(file)
        except OSError:
            continue
        if found.st_nlink > 1 and stat.S_ISREG(found.st_mode):
            return (
                f"{file} has {found.st_nlink} names (hard links), and beside each of them would be a lock file that "
                f"excludes nobody who uses another one. Remove the others (find -samefile shows them), or make them "
                f"symbolic links"
            )
        if _is_mounted(file, found.st_dev):
            return (
                f"{file} is mounted by itself, without its folder. Whoever has it elsewhere finds no common lock file, "
                f"and SQLite no common log. Mount the folder instead"
            )
    return None


def _is_mounted(file: str, device: int) -> bool:
    if any(point == file for point, _ in mounts()):
        return True
    with contextlib.suppress(OSError):  # where /proc is not mounted, and for other systems
        return os.stat(os.path.dirname(file)).st_dev != device
    return False


def mounts(table: str = "/proc/self/mountinfo") -> Iterator[tuple[str, str]]:
    """Where something is mounted, and the type of its file system; nothing on systems that do not tell."""
    try:
        with open(table, errors="surrogateescape") as lines:
            for line in lines:
                before, _, after = line.partition(" - ")
                point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
                yield point, after.split(" ")[0]
    except (OSError, IndexError):
        return


def network_file_system(path: str, table: str = "/proc/self/mountinfo") -> str | None:
    """The type of the file system of ``path``, if it is one that several machines may use at once."""
    folder, best, found = os.path.dirname(path), "", ""
    for point, type_ in mounts(table):
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two on one point the later one covers the other
            best, found = point, type_
    return found if found.removeprefix("fuse.") in NETWORK else None


def unwritable(path: str) -> str | None:
    """Why no lock file can be used at ``path``, as far as its folder says; None if nothing is wrong with that."""
    folder = os.path.dirname(path)
    effective = os.access in os.supports_effective_ids
    if not path or not os.path.isdir(folder) or os.access(folder, os.W_OK | os.X_OK, effective_ids=effective):
        return None
    return (
        f"the folder {folder} must be writable for the user of this process, since SQLite makes the files "
        f"{', '.join(os.path.basename(path) + side for side in SIDES)} in it"
    )


def share(database: str, path: str) -> None:
    """Give a new lock file the mode and owner of its database, as SQLite does with its own side files.

    Otherwise the cron job of root would make a file that the web server's user cannot write.
    """
    try:
        like = os.stat(database)
        for side in SIDES:
            os.chmod(path + side, like.st_mode & 0o777)
            if os.geteuid() == 0:
                os.chown(path + side, like.st_uid, like.st_gid)
    except (OSError, AttributeError):
        pass
