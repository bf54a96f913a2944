"""What it costs to hold many locks, to have many waiters, and to work beside many leases of others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.contenders import ensure
from benchmarks.crew import Servers, Worker, crew
from benchmarks.measures import in_turn, voiding
from benchmarks.results import Series, overlap

#: Leases are renewed every third of it. The one that our figures are about.
TTL = 6.0
#: Who holds how many: a thread for each hold, as others have it, ends at a thousand.
HOLDERS = {
    1_000: ("sqlite/angee_jobs", "sqlite/flexiq", "postgres/angee_jobs", "postgres/flexiq", "redis/angee_jobs",
            "redis/flexiq", "redis/python-redis-lock"),
    10_000: ("sqlite/angee_jobs", "postgres/angee_jobs", "redis/angee_jobs"),
    200: ("advisory/angee_jobs", "advisory/django-pglock"),
}  # fmt: skip
WAITERS = ("process/angee_jobs", "sqlite/angee_jobs", "sqlite/flexiq", "postgres/angee_jobs", "advisory/angee_jobs",
           "redis/angee_jobs", "redis/flexiq")  # fmt: skip
GROWN = ("sqlite", "postgres", "redis")
LEASES = (1, 1_000, 100_000)
REAPED = (10_000, 100_000)

Say = Callable[[str], None]


def measure(storages: list[str], running: Servers, say: Say) -> list[Series]:
    return [*_holders(storages, running, say), *_waiters(storages, running, say)]


def _holders(storages: list[str], running: Servers, say: Say) -> list[Series]:
    series = []
    for count, holders in HOLDERS.items():
        cpu = Series(f"hold_{count}", "% of a core", more=False)
        threads = Series(f"hold_{count}_threads", "threads", more=False)
        asked = Series(f"hold_{count}_requests", "requests per renewal interval", more=False)
        memory = Series(f"hold_{count}_memory", "kB per hold", more=False)
        series += [cpu, threads, asked, memory]
        for contender in holders:
            if contender.partition("/")[0] not in storages:
                continue
            say(f"{contender} holds {count}")
            with crew([contender], each=2) as workers, voiding([cpu, threads, asked, memory], contender):
                holder, other = workers[contender]
                held = holder.ask("hold", key="bench-hold", count=count, ttl=TTL)
                holder.ask("idle", seconds=TTL / 3)  # the first renewals bring them together
                before = requests(running, contender)
                idle = holder.ask("idle", seconds=TTL * 2)
                after = requests(running, contender)
                for index in (0, count // 2, count - 1):
                    ensure(not other.ask("attempt", key=f"bench-hold-{index}"), f"hold {index} of {count} was lost")
                holder.ask("drop")
                ensure(other.ask("attempt", key="bench-hold-0"), "not free after the release")
            if contender in cpu.void:
                continue
            cpu.add(contender, idle["cpu"] * 100)
            threads.add(contender, idle["threads"])
            memory.add(contender, held["bytes"] / count / 1024)
            if idle["batches"] is not None and not contender.startswith("advisory/"):
                asked.add(contender, idle["batches"] * TTL / 3)
            elif after is not None and before is not None:
                asked.add(contender, (after - before) / 6)
    return series


def requests(running: Servers, contender: str) -> int | None:
    """How many the server has answered so far; None where there is none that counts."""
    storage = contender.partition("/")[0]
    if storage == "redis":
        with running.valkey.connect() as client:
            return int(client.info("stats")["total_commands_processed"])
    if storage in ("postgres", "advisory"):
        time.sleep(1.2)  # the server gathers its figures every second
        sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        return int(running.postgres.query(sql)[0][0])
    return None


def _waiters(storages: list[str], running: Servers, say: Say, count: int = 1000) -> list[Series]:
    passed = Series("waiters", "holders per second, while 1,000 threads pass one lock on")
    cpu = Series("waiters_cpu", "% of a core, while they all wait", more=False)
    asked = Series("waiters_requests", "requests per second, while they all wait", more=False)
    for contender in WAITERS:
        if contender.partition("/")[0] not in storages:
            continue
        say(f"{count} threads wait on {contender}")
        with crew([contender], each=2) as workers, voiding([passed, cpu, asked], contender):
            waiting, other = workers[contender]
            holder = waiting if contender.startswith("process/") else other
            holder.ask("enter", key="bench-waiters")
            waiting.ask("waiters", key="bench-waiters", count=count, timeout=60)
            waiting.ask("idle", seconds=5.0)  # until all of them stand in line
            before = requests(running, contender)
            idle = waiting.ask("idle", seconds=4.0)
            after = requests(running, contender)
            left = holder.ask("leave")
            done = waiting.ask("waited")
            ensure(not done["failed"], f"{len(done['failed'])} waiters failed: {done['failed'][:1]}")
            ensure(not overlap(done["spans"]), "two waiters were inside at once")
            ensure(len(done["spans"]) == count, "waiters are missing")
        if contender in passed.void:
            continue
        passed.add(contender, count / (max(end for _, end in done["spans"]) - left))
        cpu.add(contender, idle["cpu"] * 100)
        if before is not None and after is not None:
            asked.add(contender, (after - before) / 4)
    return [passed, cpu, asked]


def growth(storages: list[str], running: Servers, say: Say, rounds: int = 4) -> list[Series]:
    """The cost of a pair beside so many leases of others, and of removing those that expired.

    The bare statements, which know nothing of the others, are timed in the same rounds: what the machine does to
    them is not counted.
    """
    series = [
        *(Series(f"growth_{count}", "cost of a pair, where 1 is beside one lease", more=False) for count in LEASES[1:]),
        *(Series(f"reap_{count}", "ms for each 1,000 expired leases", more=False) for count in REAPED),
    ]
    for storage in [each for each in GROWN if each in storages]:
        names = [f"{storage}/angee_jobs", f"{storage}/bare"]
        with crew(names) as workers, voiding(series, names[0]):
            ours, bare = workers[names[0]][0], workers[names[1]][0]
            costs: dict[int, list[float]] = {}
            there = 0
            for count in LEASES:
                say(f"a pair on {storage} beside {count} leases")
                ours.ask("fill", first=there, count=count - there, seconds=3600.0)
                there = count
                for number in range(rounds):
                    rates = {}
                    for name in in_turn(names, number):
                        worker = ours if name == names[0] else bare
                        done = worker.ask("loop", form="pairs", key="bench-growth", seconds=0.4)
                        rates[name] = done["rate"]
                    costs.setdefault(count, []).append(rates[names[1]] / rates[names[0]])
            for each, count in zip(series, LEASES[1:], strict=False):
                for cost in costs[count]:
                    each.add(names[0], cost / statistics.median(costs[1]))
            for each, count in zip(series[2:], REAPED, strict=True):
                say(f"reap {count} on {storage}")
                each.add(names[0], _reap(ours, count))
    return series


def _reap(worker: Worker, count: int) -> float:
    """Milliseconds for each thousand."""
    worker.ask("fill", first=10 * count, count=count, seconds=0.05)
    time.sleep(0.2)
    done: dict[str, Any] = worker.ask("reap")
    ensure(done["removed"] == count, f"{done['removed']} were reaped, and {count} had expired")
    return done["seconds"] * 1000 / (count / 1000)
