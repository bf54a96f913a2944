"""What places, shared holds and several keys cost beside an exclusive block, in one process.

    python -m benchmarks.places [--storage sqlite,postgres,advisory,redis,default] [--rounds N]

Slices of all forms in turn, in another order each round. Printed are ratios of the medians; an exclusive block is 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.crew import servers

SLICE_SECONDS = 0.15
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "exclusive": ("exclusive", {}),
    "slots=8": ("placed", {"slots": 8}),
    "shared=True": ("shared", {"shared": True}),
    "two keys": (["first", "second"], {}),
}


def seconds_of(form: str, backend: str) -> float:
    """Of one block, uncontended."""
    from angee_jobs.locks import lock

    key, options = FORMS[form]
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < SLICE_SECONDS:
        for _ in range(10):
            with lock(key, backend=backend, **options):
                pass
        count += 10
    return spent / count


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.places")
    parser.add_argument("--storage", default="default,sqlite,postgres,advisory,redis")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    storages = options.storage.split(",")
    with servers(set(storages)):
        import django

        django.setup()
        print(f"{'':10}" + "".join(f"{form:>24}" for form in FORMS))
        for storage in storages:
            taken: dict[str, list[float]] = {form: [] for form in FORMS}
            for number in range(options.rounds + 1):
                for form in sorted(FORMS, key=lambda form: (hash((form, number)), form)):
                    seconds = seconds_of(form, storage)
                    if number:  # the first round connects
                        taken[form].append(seconds)
            medians = {form: statistics.median(each) for form, each in taken.items()}
            row = [f"{each * 1e6:.0f} us, {each / medians['exclusive']:.2f}" for each in medians.values()]
            print(f"{storage:10}" + "".join(f"{each:>24}" for each in row), flush=True)


if __name__ == "__main__":
    main()
