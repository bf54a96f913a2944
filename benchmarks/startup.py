"""What the first lock of a fresh process costs: the import, and the first block."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from benchmarks.crew import ROOT, WorkerFailed
from benchmarks.results import Series

_TIMED = "import time; started = time.perf_counter(); {}; print(time.perf_counter() - started)"
_SET_UP = "import django; django.setup(); "
_ENTER = (
    'from angee_jobs.locks import lock; exec(\'with lock("bench-first", backend="{}"): pass\')'  # a block in one line
)
_FLEXIQ = 'from benchmarks.contenders import CONTENDERS; exec(\'with CONTENDERS["{}"]().block("first")(): pass\')'
IMPORTS = {
    "process/angee_jobs": "import angee_jobs.locks",
    "process/Django's models, which that imports": "import django.db.models",
    "process/flexiq": "import flexiq",
}

Say = Callable[[str], None]


def measure(storages: list[str], rounds: int, say: Say) -> list[Series]:
    imports = Series("import", "ms, import in a fresh process", more=False)
    first = Series("first", "ms, first block of a fresh process", more=False)
    blocks = {f"{each}/angee_jobs": ("default" if each == "process" else each) for each in storages}
    for number in range(rounds):
        say(f"fresh processes: round {number + 1} of {rounds}")
        for contender, statement in IMPORTS.items():
            imports.add(contender, _seconds("", statement) * 1000)
        for contender, alias in blocks.items():
            first.add(contender, _seconds(_SET_UP, _ENTER.format(alias)) * 1000)
            peer = contender.replace("angee_jobs", "flexiq")
            if peer in ("sqlite/flexiq", "postgres/flexiq", "redis/flexiq"):
                first.add(peer, _seconds(_SET_UP + "import flexiq; ", _FLEXIQ.format(peer)) * 1000)
    return [imports, first]


def _seconds(before: str, statement: str) -> float:
    code = before + _TIMED.format(statement)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, check=False, capture_output=True, text=True)
    if done.returncode:
        raise WorkerFailed(f"{statement}\n{done.stderr}")
    return float(done.stdout.split()[-1])
