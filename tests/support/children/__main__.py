"""`python -m tests.support.children MODULE[:FUNCTION] ARGS...`: see `tests.support.procs.Child`."""

import importlib
import os
import signal
import sys

from tests.support.launch import die_with_parent


def main(script: str, *args: str) -> None:
    if parent := os.environ.pop("ANGEE_JOBS_TEST_PARENT", ""):
        die_with_parent(int(parent), signal.SIGKILL)

    import django

    django.setup()
    module, _, function = script.partition(":")
    getattr(importlib.import_module(f"tests.support.children.{module}"), function or "main")(*args)


main(*sys.argv[1:])
