"""The measurements of single locks, round by round over all contenders, and of many that want one."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator

from benchmarks.contenders import Void, ensure
from benchmarks.crew import Worker, WorkerFailed, assert_excludes, crew
from benchmarks.results import Series, fairness, overlap, percentile

Crew = dict[str, list[Worker]]
#: Where a contender has no such question, or cannot wait.
UNABLE = {
    "asked": {"advisory/django-pglock"},
    "wait": {"sqlite/bare", "postgres/bare", "advisory/bare", "redis/bare", "process/angee_jobs"},
}
LOOPS = {
    "block": "blocks/s, one thread",
    "pairs": "pairs/s, one thread",
    "threads": "blocks/s, 8 threads on 8 keys",
    "refused": "refused tries/s",
    "asked": "answers/s of is_held",
}

Say = Callable[[str], None]


@contextlib.contextmanager
def voiding(series: list[Series], contender: str) -> Iterator[None]:
    """A contender that does not exclude, or breaks, has no values in these series, only the reason."""
    try:
        yield
    except (Void, WorkerFailed) as error:
        for each in series:
            each.void[contender] = str(error)
            each.values.pop(contender, None)


def in_turn(names: list[str], round_number: int) -> list[str]:
    """Another order each round, or what one leaves behind would always hit the same next one."""
    at = round_number % len(names)
    ordered = names[at:] + names[:at]
    return ordered if round_number % 2 else ordered[::-1]


def loops(workers: Crew, forms: list[str], rounds: int, seconds: float, say: Say) -> list[Series]:
    """Pairs, refusals and questions, from one process."""
    series = {form: Series(form, LOOPS[form]) for form in forms}
    for number in range(rounds):
        say(f"one process: round {number + 1} of {rounds}")
        for form, each in series.items():
            for contender in in_turn(list(workers), number):
                if contender in each.void or contender in UNABLE.get(form, ()):
                    continue
                with voiding([each], contender):
                    each.add(contender, _slice(*workers[contender][:2], form, seconds))
    return list(series.values())


def _slice(worker: Worker, other: Worker, form: str, seconds: float) -> float:
    key = f"bench-{form}"
    # What stays inside one process is shown to exclude there; everything else to another process.
    witness = worker if worker.contender.startswith("process/") else other
    assert_excludes(worker, witness, key)
    if form in ("refused", "asked"):
        ensure(witness.ask("take", key=key), f"{key} is not free")
        done = worker.ask("loop", form=form, key=key, seconds=seconds)
        ensure(witness.ask("give", key=key), f"the hold of {key} was lost")
    elif form == "threads":
        done = worker.ask("threads", form="blocks", key=key, seconds=seconds, threads=8)
    else:
        done = worker.ask("loop", form={"block": "blocks"}.get(form, form), key=key, seconds=seconds)
    assert_excludes(witness, worker, key)
    return done["rate"]


def hand_over(workers: Crew, rounds: int, samples: int, say: Say) -> list[Series]:
    """From the release in one process to the entry of another that waits."""
    medians = Series("handover", "ms, median of the hand-over", more=False)
    worst = Series("handover_p99", "ms, 99th percentile of the hand-over", more=False)
    everything: dict[str, list[float]] = {}
    rng = random.Random(7)
    for number in range(rounds):
        say(f"hand-over: round {number + 1} of {rounds}")
        for contender in in_turn([name for name in workers if name not in UNABLE["wait"]], number):
            if contender in medians.void:
                continue
            with voiding([medians, worst], contender):
                pair = workers[contender][:2]
                assert_excludes(*pair, "bench-handover")
                taken = [_hand_over(pair, at, rng.uniform(0.04, 0.14)) for at in range(samples)]
                pair[samples % 2].ask("leave")
                medians.add(contender, percentile(taken, 50) * 1000)
                everything.setdefault(contender, []).extend(taken)
    for contender, taken in everything.items():
        if contender not in worst.void:
            worst.add(contender, percentile(taken, 99) * 1000)
    return [medians, worst]


def _hand_over(pair: list[Worker], at: int, after: float) -> float:
    """One hand-over, from the one that has it since the last time; in seconds."""
    holder, waiter = pair[at % 2], pair[(at + 1) % 2]
    if at == 0:
        holder.ask("enter", key="bench-handover")
    waiter.tell("enter", key="bench-handover", timeout=10.0)
    left = holder.ask("leave", after=after)
    entered = waiter.answer()
    ensure(entered > left, f"{waiter.contender}: entered before {holder.contender} had left")
    return entered - left


def contention(storages: list[str], names: list[str], rounds: int, seconds: float, say: Say) -> list[Series]:
    """8 processes that share one key politely, and 8 that fight for it."""
    series = {
        "polite": Series("polite", "entries/s, 8 polite processes"),
        "polite_p99": Series("polite_p99", "ms, 99th percentile of the polite wait", more=False),
        "polite_fair": Series("polite_fair", "largest share over smallest, polite", more=False),
        "fight": Series("fight", "entries/s, 8 processes that fight"),
        "fight_fair": Series("fight_fair", "largest share over smallest, fighting", more=False),
    }
    for storage in storages:
        mine = [name for name in names if name.startswith(f"{storage}/") and name not in UNABLE["wait"]]
        if not mine:
            continue
        with crew(mine, each=8) as workers:
            for number in range(rounds):
                say(f"8 processes on {storage}: round {number + 1} of {rounds}")
                for contender in in_turn(mine, number):
                    if contender in series["polite"].void:
                        continue
                    with voiding(list(series.values()), contender):
                        _contend(series, workers[contender], "polite", seconds)
                        _contend(series, workers[contender], "fight", seconds / 2)
    return list(series.values())


def _contend(series: dict[str, Series], workers: list[Worker], task: str, seconds: float) -> None:
    contender, key = workers[0].contender, f"bench-{task}"
    start = time.monotonic() + 0.1
    for worker in workers:
        worker.tell(task, key=key, start=start, seconds=seconds)
    answers = [worker.answer() for worker in workers]
    spans = [span for answer in answers for span in answer["spans"]]
    ensure(not overlap(spans), f"{contender}: two processes were inside at once")
    # Those who were still waiting at the end came in after it.
    counts = [sum(start <= span[0] < start + seconds for span in answer["spans"]) for answer in answers]
    series[task].add(contender, sum(counts) / seconds)
    series[f"{task}_fair"].add(contender, fairness(counts))
    if task == "polite":
        waits = [wait for answer in answers for wait in answer["waits"]]
        series["polite_p99"].add(contender, percentile(waits, 99) * 1000)
