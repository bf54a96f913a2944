"""Start a server so that it cannot outlive the tests: `launch.py PARENT UID GID SIGNAL PROGRAM ARGS...`

A program of its own and not a `preexec_fn`, which may deadlock in a process that has threads. UID and
GID of -1 change nothing. Where the kernel can do it (Linux), the server gets SIGNAL when its parent dies.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: int) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before we asked
        raise SystemExit("the parent process is gone")


def main(parent: str, uid: str, gid: str, signum: str, *argv: str) -> None:
    if int(uid) != -1:
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    die_with_parent(int(parent), int(signum))  # after the change of user, which would reset it
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main(*sys.argv[1:])
