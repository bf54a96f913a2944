"""An hour of steady mixed load on every backend at once: does anything grow?

    python -m tests.torture.soak --minutes 60 --record

Samples are taken every half a minute. At the end, the median of the second half of those after the warm-up must not
be above that of the first half by more than what is allowed in ``ALLOWED``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from tests.torture.ground import BACKENDS, Ground, missing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "soak.md"
#: How many processes each backend has.
PROCESSES = 2
#: The length of a lease in seconds: that of the package.
TTL = 30.0
#: What of the time is warm-up.
WARM_UP = 0.2
#: How much larger the second half's median may be: a share of the first half's, and so many more.
ALLOWED = {
    "memory, MiB": (0.03, 1.0),
    "Python objects": (0.01, 500),
    "threads": (0.0, 1),
    "open files": (0.0, 2),
    "holds": (0.0, 1),
    "sessions": (0.0, 2),
    "advisory locks": (0.0, 2),
    "rows": (0.2, 50),
    "keys": (0.2, 50),
    "clients": (0.0, 2),
    "size of the lock file, KiB": (0.1, 64),
    "memory of the server, MiB": (0.05, 2.0),
}

Sample = dict[tuple[str, str], float]


class Soak:
    def __init__(self, ground: Ground, backends: list[str], pace: float, keys: int) -> None:
        self.ground = ground
        self.loads: dict[str, list[subprocess.Popen[str]]] = {}
        for backend in backends:
            processes = 1 if backend == "local" else PROCESSES
            self.loads[backend] = [self._start(backend, index, pace, keys) for index in range(processes)]
        self.samples: list[tuple[float, Sample]] = []
        self.counts: dict[str, dict[str, int]] = {}
        self.errors: list[str] = []
        self.unanswered = 0

    def _start(self, backend: str, index: int, pace: float, keys: int) -> subprocess.Popen[str]:
        words = [backend, str(index), self.ground.register_of(backend), str(pace), str(keys)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.load", *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.ground.logs / f"{backend}-{index}.err").open("w"),
            text=True,
        )
        self.ground.callback(process.wait, 30)
        self.ground.callback(process.kill)
        return process

    def _ask(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """What a process has in memory; SystemExit if it has died."""
        assert process.stdin and process.stdout
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (OSError, ValueError):
            said = "".join(path.read_text()[-2000:] for path in self.ground.logs.glob("*.err"))
            raise SystemExit(f"the load {process.args} has died\n{said}") from None

    def sample(self) -> None:
        import psutil

        found: Sample = {}
        self.errors.clear()
        self.unanswered = 0
        for backend, processes in self.loads.items():
            counts: dict[str, int] = {}
            for process in processes:
                told = self._ask(process)
                seen = psutil.Process(process.pid)
                figures = {
                    "memory, MiB": seen.memory_full_info().uss / 2**20,
                    "Python objects": told["objects"],
                    "threads": seen.num_threads(),
                    "open files": seen.num_fds(),
                    "holds": told["holds"],
                }
                for name, figure in figures.items():
                    found[backend, name] = found.get((backend, name), 0) + figure
                for name, count in told["counts"].items():
                    counts[name] = counts.get(name, 0) + count
                self.errors += told["errors"]
                self.unanswered += told["unanswered"]
            self.counts[backend] = counts
        found |= self._servers()
        self.samples.append((time.monotonic(), found))

    def _servers(self) -> Sample:
        import sqlite3

        found: Sample = {}
        if "sqlite" in self.loads:
            file = self.ground.directory / "sqlite" / "locked.sqlite3.locks"
            connection = sqlite3.connect(file)
            [(rows,)] = connection.execute("SELECT count(*) FROM lock")
            connection.close()
            found["sqlite", "rows"] = rows
            found["sqlite", "size of the lock file, KiB"] = file.stat().st_size / 1024
        if server := self.ground.servers.get("postgres"):
            found["postgres", "sessions"] = len(server.sessions())
            found["postgres", "advisory locks"] = server.advisory_locks()
            for table in ("tasklock", "sessionhold", "lockguard"):
                [(rows,)] = server.query(f"SELECT count(*) FROM angee_jobs_{table}")
                found["postgres", f"rows of {table}"] = rows
        if server := self.ground.servers.get("valkey"):
            with server.connect() as client:
                found["valkey", "keys"] = client.dbsize()
                found["valkey", "clients"] = len(server.clients())
                found["valkey", "memory of the server, MiB"] = client.info("memory")["used_memory"] / 2**20
        return found

    def cpu(self) -> float:
        """Seconds of processor time of all loads so far."""
        import psutil

        times = [psutil.Process(each.pid).cpu_times() for loads in self.loads.values() for each in loads]
        return sum(each.user + each.system for each in times)


def halves(samples: list[tuple[float, Sample]]) -> dict[tuple[str, str], tuple[float, float]]:
    """For each figure its median in the first and in the second half of what follows the warm-up."""
    began, ended = samples[0][0], samples[-1][0]
    warm = began + WARM_UP * (ended - began)
    middle = (warm + ended) / 2
    found = {}
    for figure in samples[0][1]:
        first = [sample[figure] for at, sample in samples if warm <= at < middle]
        second = [sample[figure] for at, sample in samples if at >= middle]
        found[figure] = statistics.median(first), statistics.median(second)
    return found


def growth(figures: dict[tuple[str, str], tuple[float, float]]) -> list[str]:
    """What has grown by more than it may."""
    grown = []
    for (where, name), (first, second) in figures.items():
        share, more = ALLOWED["rows" if name.startswith("rows") else name]
        if second > first * (1 + share) + more:
            grown.append(f"{where}: {name} grew from {first:g} to {second:g}")
    return grown


def paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 118)


def page(minutes: float, every: float, pace: float, soak: Soak, share: float, grown: list[str]) -> str:
    lines = [
        "# Soak",
        "",
        f"<!-- written by: python -m tests.torture.soak --minutes {minutes:g} --pace {pace:g} --record -->",
        "",
        *paragraph(
            f"Does anything grow? For {minutes:g} minutes, {PROCESSES} processes of each backend (one of the local "
            f"backend) did everything that a lock can do, steadily and all backends at once. All processes together "
            f"used {100 * share:.0f} % of one core. "
            f"Requests that a backend did not answer in time: {soak.unanswered}."
        ),
        "",
        "| backend | what was done | how often |",
        "| --- | --- | --- |",
    ]
    for backend, counts in soak.counts.items():
        what = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in sorted(counts.items()))
        lines.append(f"| `{backend}` | {what} | {sum(counts.values()):,} |")
    lines += [
        "",
        *paragraph(
            f"A sample was taken every {every:g} seconds. The table shows medians, without the first "
            f"{100 * WARM_UP:.0f} % of the time, which are warm-up. The figures of a backend are sums over its "
            "processes."
        ),
        "",
        "| where | what | first half | second half |",
        "| --- | --- | --- | --- |",
    ]
    for (where, name), (first, second) in halves(soak.samples).items():
        lines.append(f"| `{where}` | {name} | {first:,.1f} | {second:,.1f} |".replace(".0 |", " |"))
    lines += ["", *(f"- **Grown:** {each}" for each in grown)] if grown else ["", "Nothing grew."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.soak", description=__doc__.splitlines()[0])
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="all unless given")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two samples")
    parser.add_argument("--pace", type=float, default=2.0, help="seconds between two things that a process does")
    parser.add_argument("--keys", type=int, default=5000, help="that each process uses first, so that caches are full")
    parser.add_argument("--record", action="store_true", help=f"write the figures to {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    wanted = options.backends or ["local", *BACKENDS]
    lacking = missing(wanted)
    for backend, reason in lacking.items():
        print(f"without {backend}: {reason}", flush=True)
    backends = [each for each in wanted if each not in lacking]
    with Ground(backends, ttl=TTL) as ground:
        soak = Soak(ground, backends, options.pace, options.keys)
        soak.sample()
        began, cpu = time.monotonic(), soak.cpu()
        end = began + 60 * options.minutes
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(options.every, left))
            soak.sample()
            print(f"{time.monotonic() - began:6.0f} s  " + brief(soak), flush=True)
        share = (soak.cpu() - cpu) / (time.monotonic() - began)
        grown = growth(halves(soak.samples))
        text = page(options.minutes, options.every, options.pace, soak, share, grown)
    print(text)
    for error in soak.errors:
        print(f"error: {error}")
    if options.record and not grown and not soak.errors:
        PAGE.write_text(text)
    return 1 if grown or soak.errors else 0


def brief(soak: Soak) -> str:
    sample = soak.samples[-1][1]
    memory = sum(figure for (_, name), figure in sample.items() if name == "memory, MiB")
    things = sum(sum(counts.values()) for counts in soak.counts.values())
    rest = {f"{where} {name}": round(figure, 1) for (where, name), figure in sample.items() if name != "memory, MiB"}
    return f"{things} done, {memory:.1f} MiB, errors {soak.errors[:3]}, {rest}"


if __name__ == "__main__":
    raise SystemExit(main())
