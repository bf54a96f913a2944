"""The page of guarantees: each promise, and the tests of it. ``python -m tests.guarantees`` writes it anew.

The promises are written here; the tests are found in the contract suite, so that none can be forgotten, and in the
modules of this suite that are named beside a promise.
"""

import ast
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE, TORTURE = ROOT / "docs" / "guarantees.md", ROOT / "docs" / "torture.md"
CONTRACT = ROOT / "angee_jobs" / "locks" / "testing" / "contract"


class Promise(NamedTuple):
    title: str
    text: str
    parts: list[str]
    """Classes of the contract suite."""
    modules: list[str]
    """Modules of this suite that test the same further."""
    rules: list[str] = []
    """Rules of the checker of the torture run."""


PROMISES = [
    Promise(
        "Exclusion",
        "A key has at most one unexpired hold, by the backend's clock. This excludes threads, coroutines, "
        "processes and machines, and refuses a second try by the thread that holds the lock. Threads and tasks "
        "may share one `Lock` object: each entry has a hold of its own. `LocalLockBackend` promises this inside "
        "one process only, and says so.",
        ["Exclusion", "SharedObject"],
        ["policy/test_async", "policy/test_fork", "docs/test_demo"],
        ["exclusion"],
    ),
    Promise(
        "Places, shared holds, several keys",
        "With `slots=n` a key has at most n holders at once, with `shared=True` any number, and neither beside an "
        "exclusive one. Each has a lease, a loss and a rising token of its own. New ones stand behind an exclusive "
        "waiter. Of several keys a caller gets all or none, and callers never wait for each other in a circle.",
        [
            "PlacesCase",
            "Places",
            "PlacesInTransactions",
            "PlacesElsewhere",
            "SeveralCase",
            "Several",
            "SeveralInTransactions",
        ],
        ["properties/test_places"],
    ),
    Promise(
        "Ownership",
        "Release and extend act only on the hold that they belong to. A late request never touches the next hold,"
        " and never brings a hold back.",
        ["Ownership"],
        [],
        ["ownership"],
    ),
    Promise(
        "Crash",
        "If the holder is killed, its lock comes free: a lease within its ttl, a session lock at once.",
        ["Crash"],
        ["integrations/test_celery", "commands/test_run_locked"],
        ["refused_for_a_reason"],
    ),
    Promise(
        "Renewal",
        "While a block runs, its lease is renewed every third of the ttl. One thread does this for the whole "
        "process. A failed renewal is retried until the lease is over. After the release, nothing renews. Where "
        "connections, descriptors, threads or memory run out, waiters pay for it, and not holders.",
        ["Renewal"],
        ["policy/test_renewal"],
    ),
    Promise(
        "A loss is known",
        "The holder of a lease learns of its loss at the latest when the lease ends, even if the server cannot be"
        " reached or a call hangs; the holder of a session lock within two seconds. `lost`, `check()`, the signal"
        " `lock_lost` and the end of the block report the loss.",
        ["Loss"],
        ["backends/test_advisory"],
        ["belief", "told_in_time", "signalled"],
    ),
    Promise(
        "Waiting",
        "`timeout` is the total wait, even if the server hangs. A lost wake-up costs at most a second. Inside a "
        "process, waiters are served in the order in which they arrived.",
        ["Waiting"],
        ["policy/test_waiting", "backends/test_redis_waiting", "policy/test_async"],
        ["answered", "refused_for_a_reason"],
    ),
    Promise(
        "Fencing",
        "The fencing tokens of a key strictly increase, over releases, expiry, reaping, deleted rows and an "
        "emptied storage.",
        ["Fencing"],
        [],
        ["fencing"],
    ),
    Promise(
        "Guard",
        "Once a newer holder's guarded transaction has committed, an older holder's cannot commit any more.",
        ["Guard"],
        ["policy/test_guard"],
        ["register"],
    ),
    Promise(
        "Server time",
        "Only the backend's clock decides what has expired.",
        ["Clock"],
        [],
        ["exclusion"],
    ),
    Promise(
        "Transactions",
        "Locks neither use nor disturb the caller's connection. A block inside `atomic()` keeps its lock until "
        "the commit or rollback, and frees it before the body's `on_commit` callbacks run.",
        ["TransactionCase", "Transactions", "Rollbacks"],
        ["policy/test_transactions", "integrations/test_test_runs", "policy/test_async_django"],
    ),
    Promise(
        "Two channels",
        "A refusal is an answer, and a backend that cannot be reached is an error. The two are never confused. "
        "Bad arguments are refused before anything is acquired. No message has an owner id.",
        ["Broken", "Secrecy"],
        [
            "policy/test_bad_input",
            "policy/test_settings",
            "backends/test_redis_checks",
            "backends/test_postgres_checks",
        ],
    ),
    Promise(
        "Python",
        "Locks are safe with threads, coroutines, cancellation and fork, and when a signal handler raises an "
        "exception at any instruction. A process that was forked without Python's knowledge counts as a new "
        "process.",
        ["Python"],
        [
            "policy/test_locked",
            "policy/test_lock_object",
            "policy/test_async_cancel",
            "policy/test_fork",
            "backends/test_postgres_session",
        ],
        ["children"],
    ),
    Promise(
        "Who holds what",
        "Whether a lock is held agrees with what a try would give. Lists are complete, reaping touches no live "
        "hold, and signals report what happened.",
        ["Information", "Reaping", "Signals"],
        ["admin/test_page", "commands/test_commands", "policy/test_signals", "policy/test_receivers"],
    ),
]

HEAD = """# Guarantees

<!-- written by: python -m tests.guarantees -->

This page names each promise and its tests. The tests under "for every backend" are one suite, which comes with the
package: you can [run it too](howto/backend.md). It runs over

{runs}

against real servers, which the tests start, kill, stop and put behind poolers. A number such as `s13` is that of
[a failure that users of lock libraries reported](explanation/reported-failures.md). What is *not* promised has
[a page of its own](explanation/not-promised.md).

[The torture run](torture.md) does everything at once. It kills, stops and deceives processes and servers at random, and
a checker proves or refutes these promises from the logs of the processes. The rules of the checker are named below. The
recorded run had {faults} faults of {kinds} kinds in {seconds} seconds, {sections} protected sections, {losses} losses
that were reported, and {violations} violations. [Steady load](soak.md) shows whether anything grows.
"""

RUNS = {
    "backends/test_contract": "the local backend, the lock table on SQLite and on PostgreSQL",
    "backends/test_table_pooled_contract": "the lock table through PgBouncer, with transaction pooling",
    "backends/test_advisory_contract": "PostgreSQL session locks, directly and through PgBouncer with session pooling",
    "backends/test_redis_contract": "Valkey, with Django's and with django-redis' cache; Redis 7",
    "backends/test_third_party": "a third party's backend that has only `try_acquire` and `is_held`",
}


#: The strategies of the suite: the class, the module that it is in, and what it tests.
STRATEGIES = {
    "Local": ("support/strategies", "`LocalLockBackend`"),
    "SqliteTable": ("support/strategies", "`TableLockBackend`, SQLite"),
    "PostgresTable": ("support/strategies", "`TableLockBackend`, PostgreSQL"),
    "PooledTable": ("backends/test_table_pooled_contract", "the same through PgBouncer"),
    "Advisory": ("backends/test_advisory_contract", "`PostgresAdvisoryLockBackend`"),
    "Redis": ("backends/test_redis_contract", "`RedisLockBackend`"),
}


def literal(module: Path, name: str, within: str = "") -> dict[str, str]:
    """The dict that ``name`` is at the top of the module, or in a class of it; empty if there is none."""
    body = ast.parse(module.read_text()).body
    if within:
        [body] = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == within]
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return {}


def what_is_lacking() -> list[str]:
    """A row for each backend and what it cannot be tested for, with the reason."""
    capabilities = literal(CONTRACT / "strategy.py", "CAPABILITIES")
    rows = []
    for name, (module, title) in STRATEGIES.items():
        lacks = literal(ROOT / "tests" / f"{module}.py", "lacks", name)
        rows += [f"| {title} | {capabilities[each]} | {why} |" for each, why in lacks.items()]
        if not lacks:
            rows.append(f"| {title} | nothing | |")
    return rows


def contract_tests() -> dict[str, list[str]]:
    """The test methods of the contract suite, by their class."""
    found: dict[str, list[str]] = {}
    for module in sorted(CONTRACT.glob("*.py")):
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names = [each.name for each in node.body if getattr(each, "name", "").startswith("test_")]
                if names:
                    found[node.name] = names
    return found


def torture() -> dict[str, str]:
    """The figures of the recorded torture run, summed over the backends, from its page."""
    text = TORTURE.read_text()
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:2] == "| "]
    sums = {
        row[0]: sum(int(cell.replace(",", "")) for cell in row[1:] if cell.replace(",", "").isdigit()) for row in table
    }
    faults = [number for name, number in sums.items() if number and not name.startswith(("*", "for "))]
    figures = {
        "seconds": text.partition("--seconds ")[2].partition(" ")[0],
        "faults": f"{sum(faults):,}",
        "kinds": str(len(faults)),
    }
    for name, row in (("sections", "sections"), ("losses", "losses told"), ("violations", "violations")):
        figures[name] = f"{sums[f'**{row}**']:,}"
    return figures


def page() -> str:
    tests = contract_tests()
    missing = tests.keys() - {part for promise in PROMISES for part in promise.parts}
    if missing:
        raise SystemExit(f"No promise names these parts of the contract suite: {', '.join(sorted(missing))}")
    runs = "\n".join(f"- {what} (`tests/{module}.py`)," for module, what in RUNS.items()).removesuffix(",")
    lines = [HEAD.format(runs=runs, **torture())]
    lines += ["A backend skips the tests that need what it cannot do:", ""]
    lines += ["| backend | cannot do | why |", "| --- | --- | --- |", *what_is_lacking(), ""]
    for number, promise in enumerate(PROMISES, 1):
        lines += [f"## {number}. {promise.title}", "", *textwrap.wrap(promise.text, 118), "", "For every backend:", ""]
        lines += [f"- `{name}`" for part in promise.parts for name in tests.get(part, [])]
        if promise.modules:
            lines += ["", "And also: " + ", ".join(f"`tests/{name}.py`" for name in promise.modules) + "."]
        if promise.rules:
            rules = ", ".join(f"`{name}`" for name in promise.rules)
            what = "rule" if len(promise.rules) == 1 else "rules"
            lines += ["", f"In [the torture run](torture.md), the {what} {rules} of `tests/torture/checker.py`."]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
