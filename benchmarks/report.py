"""What the documentation shows: the machine, tables and a chart, all made from the measured values."""

from __future__ import annotations

import math
import os
import platform
import sqlite3
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.contenders import STORAGES
from benchmarks.results import Ratio, Series, from_json

PACKAGES = ("Django", "psycopg", "redis", "flexiq", "django-pglock", "python-redis-lock")
#: What the rows of a table are about, and the measures in its columns. Ratios are those of the first one.
TABLES: list[tuple[str, list[tuple[str, str]]]] = [
    ("A block, entered and left by one thread, with renewal on", [("block", "blocks/s")]),
    ("Acquire and release without a block and without renewal, one thread", [("pairs", "pairs/s")]),
    ("Blocks of 8 threads of one process, each on its own key", [("threads", "blocks/s")]),
    ("A try that is refused, because another process holds the lock", [("refused", "tries/s")]),
    ("Asking whether a lock is held, which it is", [("asked", "answers/s")]),
    (
        "Hand-over, from the release in one process to the entry of another that waits",
        [("handover", "median, ms"), ("handover_p99", "99th percentile, ms")],
    ),
    (
        "8 processes share one key politely: wait up to 10 s, hold 1 ms, pause 5 to 15 ms",
        [("polite", "entries/s"), ("polite_p99", "wait, 99th percentile, ms"), ("polite_fair", "fairness")],
    ),
    ("The same: 99th percentile of the wait", [("polite_p99", "ms")]),
    ("8 processes take one key again and again", [("fight", "entries/s"), ("fight_fair", "fairness")]),
    *(
        (
            f"Holding {count} for a while, leases with a ttl of 6 s",
            [
                (f"hold_{key}", "% of a core"),
                (f"hold_{key}_threads", "threads"),
                (f"hold_{key}_requests", "requests per renewal"),
                (f"hold_{key}_memory", "kB per hold"),
            ],
        )
        for key, count in (("1000", "1,000 locks"), ("10000", "10,000 locks"), ("200", "200 session locks"))
    ),
    (
        "1,000 threads of one process wait for one key, then pass it on",
        [
            ("waiters", "holders/s"),
            ("waiters_cpu", "% of a core, while all wait"),
            ("waiters_requests", "requests/s, while all wait"),
        ],
    ),
    (
        "What a pair costs beside many live leases of others, where 1 is its cost beside one",
        [("growth_1000", "1,000 leases"), ("growth_100000", "100,000 leases")],
    ),
    (
        "Reaping expired leases: milliseconds for each 1,000",
        [("reap_10000", "of 10,000"), ("reap_100000", "of 100,000")],
    ),
    ("Import in a fresh process", [("import", "ms")]),
    ("The first block of a fresh process, with all connecting", [("first", "ms")]),
]
#: What the ratios to others are to reach at least.
GOALS = {
    "block/sqlite/flexiq": 3.0,
    "pairs/sqlite/flexiq": 1.0,
    "block/postgres/flexiq": 2.2,
    "block/postgres/bare": 0.85,
    "block/advisory/django-pglock": 1.5,
    "block/advisory/bare": 0.6,
    "block/redis/redis-py": 1.2,
    "pairs/redis/flexiq": 1.0,
    "handover/sqlite/flexiq": 20.0,
    "handover/postgres/flexiq": 20.0,
    "handover/redis/flexiq": 20.0,
    "polite/sqlite/flexiq": 2.5,
    "polite/postgres/flexiq": 2.5,
    "polite/redis/flexiq": 2.5,
    "polite_p99/sqlite/flexiq": 10.0,
    "polite_p99/postgres/flexiq": 10.0,
    "polite_p99/redis/flexiq": 10.0,
}
STORAGE_NAMES = {
    "process": "in the process",
    "sqlite": "SQLite, lock table",
    "postgres": "PostgreSQL, lock table",
    "advisory": "PostgreSQL, session locks",
    "redis": "Valkey",
}


def about(running: Any, seconds: float) -> dict[str, Any]:
    """The machine and the versions."""
    versions = {"Python": platform.python_version(), "SQLite": sqlite3.sqlite_version}
    if running.postgres is not None:
        versions["PostgreSQL"] = running.postgres.query("SHOW server_version")[0][0].split()[0]
    if running.valkey is not None:
        versions["Valkey"] = running.valkey.version()
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load": round(os.getloadavg()[2], 1),
    }
    return {"date": time.strftime("%Y-%m-%d"), "seconds": round(seconds), "machine": machine, "versions": versions}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def rounded(data: Any) -> Any:
    """The same with four significant digits."""
    if isinstance(data, float):
        return float(f"{data:.4g}")
    if isinstance(data, dict):
        return {name: rounded(value) for name, value in data.items()}
    return [rounded(value) for value in data] if isinstance(data, list) else data


def number(value: float) -> str:
    """Three significant digits, with commas."""
    if not math.isfinite(value):
        return "-"
    short = float(f"{value:.3g}")
    return f"{round(short):,}" if abs(short) >= 1000 else f"{short:g}"


def markdown(data: dict[str, Any]) -> str:
    """All tables that something was measured for."""
    series = {each.measure: each for each in from_json(data)}
    lines: list[str] = []
    for title, columns in TABLES:
        present = [(series[measure], head) for measure, head in columns if measure in series]
        if present:
            lines += [f"## {title}", "", *table(present), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(columns: list[tuple[Series, str]]) -> list[str]:
    """One row for each contender: medians, and of the first column the quartiles and the ratio."""
    first = columns[0][0]
    heads = ["storage", "lock", columns[0][1]]
    several = any(len(values) > 1 for values in first.values.values())
    ratios, with_goals = first.ratios(), any(name in GOALS for name in first.ratios())
    heads += ["quartiles"] if several else []
    heads += ["angee_jobs is better by"] if ratios else []
    heads += ["goal"] if with_goals else []
    heads += [head for _, head in columns[1:]]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * (len(heads) - 2)}"]
    contenders = {name for series, _ in columns for name in (*series.values, *series.void)}
    for contender in sorted(contenders, key=_rank):
        storage, _, name = contender.partition("/")
        cells = [STORAGE_NAMES.get(storage, storage), "**angee_jobs**" if name == "angee_jobs" else name]
        if contender in first.void:
            lines.append(f"| {' | '.join(cells)} | void: {_reason(first.void[contender])} |")
            continue
        ratio, goal = ratios.get(f"{first.measure}/{contender}"), GOALS.get(f"{first.measure}/{contender}")
        cells.append(_median(first, contender))
        cells += ["{} to {}".format(*map(number, first.spread(contender)))] if several else []
        cells += [_times(ratio)] if ratios else []
        cells += ["" if goal is None else f"{number(goal)} times"] if with_goals else []
        cells += [_median(series, contender) for series, _ in columns[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _reason(void: str) -> str:
    line = void.partition(": ")[2] or void
    return line.splitlines()[0].replace("|", "/") if line else ""


def _median(series: Series, contender: str) -> str:
    return number(series.median(contender)) if series.values.get(contender) else ""


def _times(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    spread = f" ({number(ratio.low)} to {number(ratio.high)})" if ratio.low != ratio.high else ""
    return f"{number(ratio.median)} times{spread}"


def _rank(contender: str) -> tuple[int, int, str]:
    storage, _, name = contender.partition("/")
    place = {"angee_jobs": 0, "bare": 2}.get(name, 1)
    return STORAGES.index(storage) if storage in STORAGES else len(STORAGES), place, name


def page(data: dict[str, Any]) -> str:
    """docs/benchmarks.md."""
    machine, versions = data["machine"], ", ".join(f"{name} {text}" for name, text in data["versions"].items())
    return f"""# Benchmarks

`tox -e bench` writes this page and its chart: do not edit them. It needs only servers that come as wheels.
`tox -e bench -- --quick` takes less than a minute, and fails if a ratio has fallen a third below the one in
`benchmarks/recorded.json`.

- Machine: {machine["processor"]}, {machine["cores"]} cores, {machine["system"]}; load {machine["load"]} during the run.
- Versions: {versions}.
- Run on {data["date"]}, in {max(1, round(data["seconds"] / 60))} minutes.

How it is measured:

- The contenders take turns. In each round all of them run once, in changing order and after a warm-up. The tables show
  the median over the rounds, with the first and third quartile. **A ratio is taken within each round**, because what
  disturbs the machine then disturbs all of them. It is greater than 1 where angee_jobs is better.
- What one thread does is timed in batches of about 2 ms, and the median batch counts. So time that the system gives to
  other programs does not count. All other figures count the whole time.
- "bare" is the limit: the two shortest statements that exclude, through the driver, without context manager, owner
  check, fencing token or renewal. On PostgreSQL both of its commits are durable, which is the server's default.
- The other libraries run as they are: with their own way to wait, and with their auto-extension on in blocks.
- Each measurement checks that the lock works: before and after it, another process must be refused while the lock is
  held, and get it afterwards. Where many processes want one lock, no two may be inside at once. A lock that fails is
  void.
- Fairness is the largest number of entries of a process, divided by the smallest.

![Blocks per second and hand-over times](benchmarks.svg)

{markdown(data)}"""
