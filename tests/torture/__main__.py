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
    parser.add_argument("--planted", choices=PLANTED, help="run a backend with this bug until the checker finds it")
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
        run.nemesis.torment(options.seconds)
        results = run.finish()
        violations = {backend: [str(each) for each in result.violations] for backend, result in results.items()}
        if any(violations.values()):
            print(run.errors(), file=sys.stderr)
            if options.keep:
                run.keep(options.keep)
        if options.record:
            write_page(options.seconds, results, run.not_injected())
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
    "unlock_false_ignored": {"terminate_holder": 1},
}


def find(options: argparse.Namespace) -> int:
    """0 as soon as the checker has found the planted bug; 1 if it has not in the time."""
    with Run([options.planted], options.seed, options.workers) as run:
        run.start()
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            run.nemesis.torment(1.0, PLANTED_FAULTS[options.planted])
            found = run.judge(options.planted).violations
            found = [each for each in found if each.rule in ("exclusion", "ownership", "told_in_time")]
            if found:
                for each in found[:5]:
                    print(each)
                return 0
        print(run.errors(), file=sys.stderr)
    print("nothing was found")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
