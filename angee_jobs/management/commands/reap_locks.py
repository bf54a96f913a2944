"""``manage.py reap_locks``: remove what expired holds left behind; for cron."""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser

from angee_jobs.locks.guard import prune_guards
from angee_jobs.locks.operations import REAP_BATCH, expired_records, reap
from angee_jobs.locks.types import grace_seconds
from angee_jobs.management.base import BACKEND_ERRORS, LockCommand, one_line

#: A guard row protects for as long as a stale holder may still come: never less than this.
GUARD_AGE = timedelta(days=1)


def _grace(text: str) -> float:
    try:
        return grace_seconds(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to ten years") from error


def _batch_size(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of locks from 1 to 1000000")
    return int(text)


class Command(LockCommand):
    help = (
        "Removes what expired locks left behind, and guard rows that are more than a day old. Locks come free "
        "without it: this only tidies up. Safe to run twice at once and while locks are taken. Prints nothing if there "
        "was nothing to remove, unless -v 2 or --dry-run is given. Exit codes: 0, also if there was nothing; 1 if a "
        "backend could not be asked, after reaping the others; 2 for wrong usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_backend_argument(parser, "Default: all of them, and the guard rows.")
        parser.add_argument(
            "--grace", type=_grace, default=0.0, metavar="SECONDS", help="Only what expired longer ago than this."
        )
        parser.add_argument(
            "--batch-size",
            type=_batch_size,
            default=REAP_BATCH,
            metavar="N",
            help=f"Locks removed by one statement (default {REAP_BATCH}).",
        )
        parser.add_argument("--dry-run", action="store_true", help="Count, and remove nothing.")
        parser.add_argument("--format", choices=["text", "json"], default="text", help="Default: text.")

    def handle(self, *args: Any, **options: Any) -> None:
        counts: dict[str, int] = {}
        errors: dict[str, str] = {}
        for alias in self.aliases(options["backend"]):
            try:
                counts[alias] = self._reap(alias, options)
            except BACKEND_ERRORS as error:
                errors[alias] = one_line(error)
        guards = 0
        if not options["backend"]:
            age = max(GUARD_AGE, timedelta(seconds=options["grace"]))
            guards = prune_guards(age, dry_run=options["dry_run"])
        self._print(counts, guards, errors, options)
        if errors:
            raise CommandError(
                "; ".join(f"The lock backend {alias!r} was not reaped: {error}" for alias, error in errors.items())
            )

    def _reap(self, alias: str, options: dict[str, Any]) -> int:
        if options["dry_run"]:
            return sum(1 for _ in expired_records(alias, options["grace"]))
        return reap(alias, options["grace"], options["batch_size"])

    def _print(self, counts: dict[str, int], guards: int, errors: dict[str, str], options: dict[str, Any]) -> None:
        total = sum(counts.values())
        if options["format"] == "json":
            result = {"removed": total, "backends": counts, "guard_rows": guards, "errors": errors}
            self.stdout.write(json.dumps({**result, "dry_run": options["dry_run"]}))
            return
        verbosity, dry_run = options["verbosity"], options["dry_run"]
        if verbosity == 0:
            return
        done = "Would remove" if dry_run else "Removed"
        for alias, count in counts.items():
            if count == 0 and verbosity == 1 and not dry_run:  # cron would send a mail every time
                continue
            self.stdout.write(f"{done} {count} expired lock{'' if count == 1 else 's'} of {alias!r}.")
        if guards:
            self.stdout.write(f"{done} {guards} old guard row{'' if guards == 1 else 's'}.")
