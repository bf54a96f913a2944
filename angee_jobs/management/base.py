"""What the commands have in common: one line for wrong usage, exit codes, names of backends and keys."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from angee_jobs.locks.conf import lock_backends
from angee_jobs.locks.errors import LockError
from angee_jobs.locks.keys import LockKey, parse_command_key
from angee_jobs.locks.types import lease_seconds, printable, wait_seconds

#: As argparse has it.
WRONG_USAGE = 2
#: As shells say that a program was ended by a signal.
BY_SIGNAL = 128


class LockCommand(BaseCommand):
    """Base of the commands. They need no database of Django's, and work while system checks fail."""

    requires_system_checks = []
    #: The exit code if ANGEE_JOBS_LOCKS cannot be read.
    wrong_configuration = 1

    def run_from_argv(self, argv: list[str]) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal may not be able to show every name
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                super().run_from_argv(argv)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # of "list_locks | head": its reader has seen enough
            with contextlib.suppress(OSError, ValueError):  # or the interpreter's exit would write there once more
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(BY_SIGNAL + signal.SIGPIPE)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.print_usage = lambda file=None: None  # type: ignore[method-assign]  # one line says what is wrong
        error = parser.error
        parser.error = lambda message: error(self.usage_error(printable(message)))  # type: ignore[method-assign]
        return parser

    def usage_error(self, message: str) -> str:
        """What argparse says, and more where it does not say what to write."""
        return message

    def add_backend_argument(self, parser: CommandParser, text: str) -> None:
        parser.add_argument("--backend", metavar="ALIAS", help=f"An alias in ANGEE_JOBS_LOCKS. {text}")

    def aliases(self, chosen: str | None) -> list[str]:
        """The chosen backend, or all of them."""
        try:
            configured = list(lock_backends)
        except ImproperlyConfigured as error:
            raise CommandError(one_line(error), returncode=self.wrong_configuration) from error
        if chosen is None:
            return configured
        if chosen not in configured:
            known = ", ".join(map(str, configured))
            self.wrong_usage(f"there is no lock backend {chosen!r}: ANGEE_JOBS_LOCKS has {known}")
        return [chosen]

    def wrong_usage(self, text: str) -> NoReturn:
        raise CommandError(text, returncode=WRONG_USAGE)


#: What a backend may raise that is not a mistake in a program.
BACKEND_ERRORS = (LockError, ImproperlyConfigured)


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|nan|[-+]?inf", re.IGNORECASE)


def one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def key_argument(text: str) -> LockKey:
    """For ``type=``: a canonical name, or a plain string."""
    try:
        return parse_command_key(os.fsencode(text).decode(errors="surrogateescape"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(one_line(error)) from error


def timeout_argument(text: str) -> float:
    """Seconds to wait; ``inf`` waits for ever."""
    return _seconds(text, lambda seconds: wait_seconds(seconds) or 0.0)


def lease_argument(text: str) -> float:
    return _seconds(text, lease_seconds)


def _seconds(text: str, check: Callable[[float], float]) -> float:
    try:
        return check(float(text))
    except ValueError as error:
        why = "" if _NUMBER.fullmatch(text.strip()) is None else f": {one_line(error)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds that can be{why}") from error
