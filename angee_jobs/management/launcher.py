"""Becomes the program that ``run_locked`` runs: ``python -I -S launcher.py PARENT CMD ARGS...``.

On Linux the program gets SIGTERM when ``run_locked`` dies without being able to stop it: its lock is not renewed then.
Asking for that must happen in the new process, where other threads of ``run_locked`` must not be about.
"""

import contextlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as in a shell


def main() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which comes before the program may, and needs no traceback
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        with contextlib.suppress(ImportError, OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit(f"run_locked: died before {command[0]} was started")
    for ignored_by_python in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, ignored_by_python):
            signal.signal(getattr(signal, ignored_by_python), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"run_locked: {command[0]}: {error.strerror}\n")
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError | NotADirectoryError) else NOT_EXECUTABLE)


if __name__ == "__main__":
    main()
