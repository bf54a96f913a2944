"""``manage.py list_locks``: who holds what, on a terminal."""

from __future__ import annotations

import fnmatch
import itertools
import json
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils import timezone

from angee_jobs.locks.keys import LockKey
from angee_jobs.locks.operations import expired_locks, held_locks, tells
from angee_jobs.locks.types import LockInfo, printable
from angee_jobs.management.base import BACKEND_ERRORS, LockCommand, one_line

HEADS = ("BACKEND", "SINCE", "EXPIRES", "TOKEN", "HOLDER", "KEY")
#: The columns are as wide as the first so many rows need, so that no number of locks has to fit into memory.
LOOK_AHEAD = 1000


class Command(LockCommand):
    help = (
        "Lists the locks that are held, of every backend. What a backend cannot know is a dash. Exit codes: 0, also "
        "if there are none, and if a third party's backend cannot list its locks, which is said; 1 if a backend "
        "could not be asked, after listing the others, or cannot list and was named; 2 for wrong usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_backend_argument(parser, "Default: all of them.")
        parser.add_argument(
            "--key",
            metavar="PATTERN",
            help="Only keys like this, with * ? and [] as in a shell: the canonical name, or a plain key as it is.",
        )
        parser.add_argument(
            "--stale", action="store_true", help="List what expired holds left behind instead: what reap_locks removes."
        )
        parser.add_argument("--format", choices=["text", "json"], default="text", help="Default: text.")

    def handle(self, *args: Any, **options: Any) -> None:
        aliases, errors = self.aliases(options["backend"]), {}
        ask = expired_locks if options["stale"] else held_locks
        pattern = options["key"]

        def found() -> Iterator[LockInfo]:
            for alias in aliases:
                try:
                    if options["backend"] is None and not tells(alias):
                        self.stderr.write(f"The lock backend {alias!r} cannot list its locks")
                        continue
                    for info in ask(backend=alias):
                        if pattern is None or _matches(info.name, pattern):
                            yield info
                except BACKEND_ERRORS as error:
                    errors[alias] = one_line(error)

        write = self._json if options["format"] == "json" else self._table
        write(found())
        if errors:
            raise CommandError(
                "; ".join(f"The lock backend {alias!r} could not be asked: {error}" for alias, error in errors.items())
            )

    def _table(self, infos: Iterator[LockInfo]) -> None:
        now, zone = datetime.now(UTC), timezone.get_current_timezone()  # aware, whatever USE_TZ says
        rows = (_row(info, now, zone) for info in infos)
        first = [*itertools.islice(rows, LOOK_AHEAD)]
        if not first:
            return
        widths = [max(map(len, column)) for column in zip(HEADS, *first, strict=True)][:-1]
        line = "  ".join([*(f"{{:{width}}}" for width in widths), "{}"])
        self._write(line.format(*row) for row in itertools.chain([HEADS], first, rows))

    def _write(self, lines: Iterator[str]) -> None:
        """Many at once: each write costs more than the line."""
        while block := "\n".join(itertools.islice(lines, LOOK_AHEAD)):
            self.stdout.write(block)

    def _json(self, infos: Iterator[LockInfo]) -> None:
        """One array, written as it comes, one lock a line."""
        first = next(infos, None)
        if first is None:
            self.stdout.write("[]")
            return
        self.stdout.write(f"[\n{json.dumps(_as_json(first))}")
        self._write(f",{json.dumps(_as_json(info))}" for info in infos)
        self.stdout.write("]")


def _matches(name: str, pattern: str) -> bool:
    if fnmatch.fnmatchcase(name, pattern):
        return True
    plain = "angee:name:"
    if not name.startswith(plain):
        return False
    try:
        return fnmatch.fnmatchcase(LockKey.parse(name).parts[0], pattern)
    except ValueError:
        return False


def _row(info: LockInfo, now: datetime, zone: tzinfo) -> tuple[str, ...]:
    since, expires = "-", "-"
    if info.acquired_at is not None:
        since = info.acquired_at.astimezone(zone).isoformat(" ", "seconds")[:19]
    if info.expires_at is not None:
        left = (info.expires_at - now).total_seconds()
        expires = f"in {left:.0f} s" if left > 0 else f"{-left:.0f} s ago"
    return (
        info.backend,
        since,
        expires,
        "-" if info.fencing_token is None else str(info.fencing_token),
        "-" if info.holder is None else str(info.holder),
        printable(info.name) + (f" ({info.place})" if info.place else ""),
    )


def _as_json(info: LockInfo) -> dict[str, Any]:
    holder = info.holder
    return {
        "backend": info.backend,
        "name": info.name,
        "acquired_at": None if info.acquired_at is None else info.acquired_at.isoformat(),
        "expires_at": None if info.expires_at is None else info.expires_at.isoformat(),
        "fencing_token": info.fencing_token,
        "slot": info.slot,
        "slots": info.slots,
        "shared": info.shared,
        "holder": None
        if holder is None
        else {name: getattr(holder, name) for name in ("host", "pid", "thread", "task", "note", "ttl")},
    }
