"""Logs of a run: a file per process, a line of JSON per event, outside of everything that is under fire.

A line is one ``write`` to a file that is only appended to, so that a process that is killed loses nothing that it had
written. Times are those of CLOCK_BOOTTIME, which all processes of a machine share, and which nobody can set.

What a worker writes; ``n`` is the number of a try in its process:

=========  =================================================================================================
up         it runs: ``pid``, ``backend``
try        asks for a lock: ``n``, ``key``, ``wait`` in seconds or null
refused    the answer was no: ``n``
failed     there was no answer: ``n``, ``why``
enter      is in the section: ``n``, ``token``, when the request that won was ``sent``, and whether it ``believes``
seen       has asked whether it still holds the lock: ``n``, ``believes``; the time is that before it asked
renewed    the backend extended a lease: ``key``, ``token``, when the request was ``sent``
told       the signal of a loss: ``key``, ``token``, ``why``
wrote      a guarded transaction was committed: ``key``, ``token``
stale      a guarded transaction was refused: ``n``
unwritten  a guarded transaction failed otherwise: ``n``, ``why``
end        is about to leave the section: ``n``, ``believes``
left       has left it: ``n``, ``how``: "released", "lost", or "failed"
fork       has forked in the section: ``n``, ``child``
child      what the forked child found: ``n``, ``released``, ``extended``, ``took``
gone       the child has ended: ``n``
lag        a sleep took longer than it should: ``seconds``
down       it ends, because it was asked to
=========  =================================================================================================

What the nemesis writes: ``fault`` with its ``kind``, from ``t0`` to ``t1``, and what it was done to.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

#: The clock of all logs. Imported by nobody from the package: the checker trusts none of its code.
now = functools.partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

Event = dict[str, Any]


class Log:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        line = json.dumps({"t": now() if t is None else t, "e": event} | fields)
        os.write(self._file, line.encode() + b"\n")


def read(path: Path) -> list[Event]:
    """The events of one log, in the order in which they were written."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]
