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
    "silence": "the connections are cut that tell waiters of releases",
    "disconnect": "a client is cut off by `CLIENT KILL`",
    "disconnect all": "all clients are cut off",
    "pause": "the server is stopped (SIGSTOP) and continued",
    "restart": "the server is restarted properly",
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
`tox -e torture` starts {workers} processes for each backend, some of them with two threads. They compete for three
keys with a ttl of two seconds, by `with` and `async with`, with and without waiting. Meanwhile processes and servers
are killed, stopped, cut off and deceived at random. Each process writes a log, to a file that no fault can reach:
when it enters and leaves a protected section, with which fencing token, and at each step whether it still believes
that it has the lock. It also writes to a database under `guard()`.
"""
CHECKER = """
Then a checker, which shares no code with the package, reads the logs. Each of these is a violation: two processes
that both believe in their lock are inside at once, unless a fault had ended one of the holds and its holder was told
in time; a process believes in a lease that is over; a loss is reported late, or not signalled; a release reports that
it freed a lock that had another holder by then; a fencing token does not rise; a guarded write goes backwards, or is
gone; a hold outlives its holder; a waiter does not hear of a release; a request is not answered in time; a child ends
the hold of its parent; a process does not end; anything is left at a server. To show that the checker finds what it
looks for, backends with planted bugs run too (`tests/torture/planted.py`): they do not check the owner, renew by an
upsert, do not look at the number of rows, ignore the `false` of an unlock, or use the client's clock.
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
When a clock jumps, it is the clock of two workers of each backend at once. Valkey writes each change to its
append-only file before it answers: without that, a crash forgets locks, as [the page on Redis](howto/redis.md) says.
No machine crashes in this run, so neither server waits for its disk. An overlap is two sections at once in which both
holders believed in their lock, after a fault had ended the older hold. What the run found while it was being written
has tests of its own, in the module of each subject.
"""


def paragraph(text: str) -> str:
    return textwrap.fill(text.strip().replace("\n", " "), 118)


def row(name: str, cells: list[float | None]) -> str:
    return f"| {name} | " + " | ".join("" if cell is None else f"{cell:,g}" for cell in cells) + " |"
