"""The torture run: ``python -m tests.torture [--seconds N] [--seed N] [--planted NAME] [--record] [BACKEND...]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from tests.torture.ground import BACKENDS, PLANTED, missing
from tests.torture.page import PAGE, write_page
from tests.torture.run import Run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__.splitlines()[0])
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=f"of {', '.join(BACKENDS)}; all unless given")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, help="of what is done at random; when it happens, still varies")
    parser.add_argument("--workers", type=int, default=8, help="processes for each backend")
    parser.add_argument(
        "--planted", choices=PLANTED, nargs="+", help="run backends with these bugs until the checker has found each"
    )
    parser.add_argument("--record", action="store_true", help=f"write the figures to {PAGE.name}")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--keep", metavar="DIR", help="copy the logs there if something was found")
    options = parser.parse_args()
    if options.planted:
        return find(options)
    backends = options.backends or list(BACKENDS)
    lacking = missing(backends)
    for backend, reason in lacking.items():
        print(f"without {backend}: {reason}", file=sys.stderr)
    if lacking and os.environ.get("ANGEE_JOBS_REQUIRE_SERVERS"):
        return 2
    with Run([each for each in backends if each not in lacking], options.seed, options.workers) as run:
        print(f"seed {run.seed}", file=sys.stderr, flush=True)
        for reason in run.not_injected():
            print(f"not injected: {reason}", file=sys.stderr)
        run.start()
        run.nemesis.begin()
        run.nemesis.torment(options.seconds)
        results = run.finish()
        violations = {backend: [str(each) for each in result.violations] for backend, result in results.items()}
        if any(violations.values()):
            print(run.errors(), file=sys.stderr)
            if options.keep:
                run.keep(options.keep)
        if options.record:
            write_page(options.seconds, options.workers, results, run.not_injected())
    if options.json:
        print(
            json.dumps(
                {
                    backend: {"figures": each.figures, "faults": each.faults, "violations": violations[backend]}
                    for backend, each in results.items()
                }
            )
        )
    else:
        for backend, result in results.items():
            print(backend)
            print("   faults", result.faults)
            for name, figure in result.figures.items():
                print(f"   {name}: {figure:g}")
            for text in violations[backend]:
                print(f"   VIOLATION {text}")
    return 1 if any(violations.values()) else 0


#: What each planted bug needs to show itself.
PLANTED_FAULTS = {
    "no_owner_check": {"force": 1},
    "renewal_by_upsert": {"force": 1},
    "zero_rows_ignored": {"force": 1},
    "clients_clock": {"clock": 1},
    "refused_frees_anothers": {"short_stop": 1},
    "unlock_false_ignored": {"terminate_holder": 1},
}
#: The rules that find them. (That somebody is slow, or a file is full, is none of their doing.)
FINDING = {"exclusion", "ownership", "told_in_time", "belief"}


def find(options: argparse.Namespace) -> int:
    """0 as soon as the checker has found the planted bugs; 1 if it has not found each in the time."""
    found: dict[str, list[str]] = {}
    with Run(options.planted, options.seed, options.workers, keys=1) as run:
        run.start()
        run.nemesis.begin({backend: PLANTED_FAULTS[backend] for backend in options.planted})
        began = time.monotonic()
        end = began + options.seconds
        while len(found) < len(options.planted) and time.monotonic() < end:
            run.nemesis.torment(1.0)
            for backend in set(options.planted) - found.keys():
                violations = run.judge(backend).violations
                if texts := [str(each) for each in violations if each.rule in FINDING]:
                    found[backend] = [f"after {time.monotonic() - began:.0f} s", *texts[:3]]
        run.nemesis.relent()
        if len(found) < len(options.planted):
            print(run.errors(), file=sys.stderr)
            if options.keep:
                run.keep(options.keep)
    for backend in options.planted:
        print(f"{backend}: {'; '.join(found.get(backend, ['NOT FOUND']))}")
    return 0 if len(found) == len(options.planted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
