"""How many calls and files a block goes through: so many that a reader can follow it."""

import itertools
import sys
from pathlib import Path

import angee_jobs.locks
from angee_jobs.locks import lock

PACKAGE = str(Path(angee_jobs.locks.__file__).parent)


def path_of(use):
    """The files of this package whose functions are called when the block is entered, in order."""
    files = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        with use:
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
    return files


def test_entering_a_block_changes_file_a_few_times():
    mine = lock("path", backend="local")
    for _ in range(3):  # the thread is running, the backend known
        with mine:
            pass
    entered = path_of(mine)
    changes = sum(1 for one, other in itertools.pairwise(entered) if one != other)
    assert changes <= 12, entered
    assert len(entered) <= 30, entered
