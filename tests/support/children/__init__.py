"""What a child process of the tests says and hears; each other module here is such a process.

A module has `main(*args: str)`. `python -m tests.support.children MODULE ARGS` runs it, which is what
`tests.support.procs.Child` does.
"""

import sys
import threading

_speaking = threading.Lock()


def say(*words: object) -> None:
    """One line to the test."""
    with _speaking:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


def hear(word: str | None = None) -> str:
    """The next line from the test; with `word`, the rest of a line that must begin with it."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit("the test is gone")
    line = line.rstrip("\n")
    if word is None:
        return line
    if line != word and not line.startswith(f"{word} "):
        raise SystemExit(f"heard {line!r} where {word!r} was expected")
    return line[len(word) + 1 :]
