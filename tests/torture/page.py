"""The page of figures, ``docs/torture.md``: what one run did, and what it found."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.torture.run import Result

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "torture.md"

TITLES = {
    "sqlite": "`TableLockBackend`, SQLite",
    "postgres_table": "`TableLockBackend`, PostgreSQL",
    "postgres_advisory": "`PostgresAdvisoryLockBackend`",
    "redis": "`RedisLockBackend`, Valkey",
}
FAULTS = {
    "kill": "a worker is killed (SIGKILL), and replaced",
    "stop": "a worker is stopped (SIGSTOP), mostly for longer than the ttl, and continued",
    "clock": "the wall clock of two of the workers jumps by an hour or two",
    "fork in the body": "a worker forks in its section; the child tries to release and to extend",
    "force": "a hold is released by force",
    "reap": "expired holds are reaped",
    "terminate": "a session is ended by `pg_terminate_backend`, often that of a holder",
    "silence": "the connections are cut on which waiters hear of releases",
    "disconnect": "a client is cut off by `CLIENT KILL`",
    "disconnect all": "all clients are",
    "pause": "the server is stopped (SIGSTOP) and continued",
    "restart": "the server is restarted in order",
    "crash": "the server is killed and started again",
    "no memory": "`maxmemory` is reached",
    "full": "the disk is full",
}
HEAD = """# Torture

<!-- written by: python -m tests.torture --seconds {seconds:g} --record -->

{what}

{checker}

| for {minutes:g} minutes | {titles} |
| --- |{dashes}
"""
WHAT = """
`tox -e torture` lets {workers} processes of each backend, some of which have two threads, fight for three keys with a
ttl of two seconds, by `with` and `async with`, with and without waiting, while processes and servers are killed,
stopped, cut off and deceived at random.
Each process writes down when it enters and leaves a protected section, with which fencing token, and at each step
whether it still believes in its lock, to a log outside of everything that is under fire. What is locked is also written
to a database under `guard()`.
"""
CHECKER = """
Then a checker, which shares no code with the package, reads the logs. A violation is: two who believe in their lock
inside at once, unless a fault had ended one of the two holds and its holder was told in time; belief in a lease that is
over; a loss that is told late, or by no signal; a release that says it freed a lock that was somebody else's by then; a
fencing token that does not rise; a guarded write that goes backwards, or is gone; a hold that outlives its holder; a
release that a waiter does not hear of; a request without an answer in time; a child that ends the hold of its parent; a
process that does not end; anything left at a server. Backends with bugs planted in them (`tests/torture/planted.py`)
show that it finds what it looks for: no check of the owner, renewal by upsert, no look at the number of rows, an
ignored `false` of an unlock, the client's clock.
"""


def write_page(seconds: float, workers: int, results: dict[str, Result], not_injected: list[str]) -> None:
    PAGE.write_text(page(seconds, workers, results, not_injected))


def page(seconds: float, workers: int, results: dict[str, Result], not_injected: list[str]) -> str:
    text = HEAD.format(
        seconds=seconds,
        minutes=seconds / 60,
        what=paragraph(WHAT.format(workers=workers)),
        checker=paragraph(CHECKER),
        titles=" | ".join(TITLES[backend] for backend in results),
        dashes=" ---: |" * len(results),
    )
    lines = []
    kinds = {kind for result in results.values() for kind in result.faults}
    for kind, what in FAULTS.items():
        if kind in kinds:
            lines.append(row(what, [result.faults.get(kind) for result in results.values()]))
    names = [name for name in next(iter(results.values())).figures if name != "forks"]  # which are above
    lines += [row(f"**{name}**", [result.figures[name] for result in results.values()]) for name in names]
    lines.append(row("**violations**", [len(result.violations) for result in results.values()]))
    found = [f"- {TITLES[backend]}: {each}" for backend, result in results.items() for each in result.violations]
    if not_injected:
        lines += ["", *(f"Not done in this run: {each}." for each in not_injected)]
    if found:
        lines += ["", "The violations:", "", *found]
    lines += ["", *textwrap.wrap(NOTES.strip().replace("\n", " "), 118)]
    return text + "\n".join(lines) + "\n"


NOTES = """
A clock that jumps is that of two workers of each backend at once. Valkey writes each change to its append-only file
before it answers: without that, a crash forgets locks, as [the page on Redis](howto/redis.md) says. Machines do not
crash here, so neither server waits for its disk. An overlap is two sections in which both holders believed in their
lock at once, after a fault had ended the older hold. What the run found while it was written has tests of its own in
`tests/backends/test_found_by_torture.py`.
"""


def paragraph(text: str) -> str:
    return textwrap.fill(text.strip().replace("\n", " "), 118)


def row(name: str, cells: list[float | None]) -> str:
    return f"| {name} | " + " | ".join("" if cell is None else f"{cell:,g}" for cell in cells) + " |"
