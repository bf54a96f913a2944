"""The benchmark: ours beside others and beside the bare driver, in one run.

    python -m benchmarks             everything, about 15 minutes; writes docs/benchmarks.md and its chart
    python -m benchmarks --quick     under a minute; fails when a ratio fell a third below the recorded one
    python -m benchmarks --record    everything, and keep the ratios as the recorded ones

A part of it: ``--storage sqlite,redis``, ``--measure block,handover``; then nothing is written but ``--json FILE``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import chart, holding, measures, report, results, startup
from benchmarks.contenders import STORAGES, of_storage
from benchmarks.crew import ROOT, Servers, crew, servers
from benchmarks.results import Series

RESULTS = ROOT / "benchmarks" / "results.json"
PAGE, CHART = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks.svg"
#: What --quick measures, and so what recorded.json guards.
QUICK = ["block", "pairs", "handover"]
EVERYTHING = [*measures.LOOPS, "handover", "contention", "holding", "growth", "startup"]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, running: Servers) -> list[Series]:
    quick, wanted = options.quick, options.measure
    names = [name for storage in options.storage for name in of_storage(storage)]
    series: list[Series] = []
    forms = [form for form in measures.LOOPS if form in wanted]
    if forms or "handover" in wanted:
        with crew(names, each=2) as workers:
            if forms:
                rounds, seconds = options.rounds or (4 if quick else 9), 0.1 if quick else 0.3
                series += measures.loops(workers, forms, rounds, seconds, say)
            if "handover" in wanted:
                rounds, samples = options.rounds or (2 if quick else 5), 4 if quick else 16
                series += measures.hand_over(workers, rounds, samples, say)
    if "contention" in wanted:
        series += measures.contention(options.storage, names, options.rounds or 3, 2.0 if quick else 4.0, say)
    if "holding" in wanted:
        series += holding.measure(options.storage, running, say)
    if "growth" in wanted:
        series += holding.growth(options.storage, running, say)
    if "startup" in wanted:
        series += startup.measure(options.storage, options.rounds or 5, say)
    return series


def guard(series: list[Series]) -> dict[str, tuple[float, float]]:
    """What has fallen, of that which these series measure."""
    measured = {name: ratio.median for name, ratio in results.all_ratios(series).items()}
    made = {each.measure for each in series}
    storages = {contender.partition("/")[0] for each in series for contender in (*each.values, *each.void)}
    recorded = {
        name: value
        for name, value in results.read_recorded().items()
        if name.split("/")[0] in made and name.split("/")[1] in storages
    }
    return results.fallen(measured, recorded)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute; compares with the recorded ratios")
    parser.add_argument("--record", action="store_true", help="keep the ratios of this run as the recorded ones")
    parser.add_argument("--report", action="store_true", help="only write the page anew from the last full run")
    parser.add_argument("--storage", help=f"some of {','.join(STORAGES)}")
    parser.add_argument("--measure", help=f"some of {','.join(EVERYTHING)}")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    partly = bool(options.storage or options.measure or options.rounds)
    options.storage = options.storage.split(",") if options.storage else list(STORAGES)
    options.measure = options.measure.split(",") if options.measure else QUICK if options.quick else EVERYTHING
    if unknown := {*options.storage} - {*STORAGES} | {*options.measure} - {*EVERYTHING}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if options.report:
        return write(json.loads(RESULTS.read_text()))
    started = time.monotonic()
    with servers({*options.storage}) as running:
        series = measure(options, running)
        fallen = guard(series) if options.quick else {}
        if fallen:
            say(f"again, since it fell: {', '.join(sorted(fallen))}")
            options.storage = sorted({name.split("/")[1] for name in fallen})
            again = measure(options, running)
            fallen = {name: values for name, values in guard(again).items() if name in fallen}
        about = report.about(running, time.monotonic() - started)
    data = results.to_json(series, **about)
    print(report.markdown(data))
    if options.json:
        options.json.write_text(json.dumps(data))
    if not options.quick and not partly:
        data = report.rounded(data)
        RESULTS.write_text(json.dumps(data) + "\n")
        write(data)
    if options.record:
        quick = [each for each in series if each.measure in QUICK]
        results.write_recorded({name: ratio.median for name, ratio in results.all_ratios(quick).items()})
    for name, (now, before) in sorted(fallen.items()):
        print(f"FALLEN: {name} is {now:.2f}, and {before:.2f} is recorded", file=sys.stderr)
    voids = [f"VOID: {each.measure} of {name}: {why}" for each in series for name, why in each.void.items()]
    print("\n".join(voids), file=sys.stderr)
    ours = [void for void in voids if "/angee_jobs:" in void]
    return 1 if fallen or ours else 0


def write(data: dict[str, Any]) -> int:
    PAGE.write_text(report.page(data))
    CHART.write_text(chart.chart(results.from_json(data)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
