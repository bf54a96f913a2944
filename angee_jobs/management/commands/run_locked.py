"""``manage.py run_locked KEY -- CMD ARGS...``: run any program under a lock; for cron on several hosts."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from angee_jobs.locks import Lock, LockBackendError, LockLostError, LockNotAcquiredError, lock
from angee_jobs.locks.conf import DEFAULT_ALIAS, lock_backends
from angee_jobs.locks.process import start_thread
from angee_jobs.locks.types import printable
from angee_jobs.management import launcher
from angee_jobs.management.base import (
    BY_SIGNAL,
    LockCommand,
    key_argument,
    lease_argument,
    one_line,
    timeout_argument,
)

# What is not the program's own exit code. Names and numbers are those of sysexits.h, where it has one.
UNAVAILABLE, REFUSED, LOST, WRONG_CONFIGURATION = 69, 75, 76, 78
#: How long a program may take to end after SIGTERM, in seconds.
GRACE = 10.0
#: How often the lock is looked at while the program runs, in seconds.
LOOK_EVERY = 0.2
FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


def exit_code_argument(text: str) -> int:
    if not text.isdecimal() or int(text) > 255:
        raise argparse.ArgumentTypeError(f"{text!r} is not an exit code from 0 to 255")
    return int(text)


class Command(LockCommand):
    help = (
        "Runs a program under a lock, on however many hosts it is started at once. Signals are passed on to it; if the "
        "lock is lost it is stopped, with SIGTERM and then SIGKILL. It finds the lock in its environment: "
        "ANGEE_LOCK_KEY (the canonical name), ANGEE_LOCK_TOKEN (the fencing token), ANGEE_LOCK_BACKEND. Exit codes: "
        "the program's own, or 128 and the number of the signal that ended it; 2 wrong usage; "
        f"{UNAVAILABLE} the lock backend cannot be used; {REFUSED}, or what --on-refused says, if another holder has "
        f"the lock; {LOST} the lock was lost; {WRONG_CONFIGURATION} the configuration of the locks is wrong; "
        f"{launcher.NOT_EXECUTABLE} the program cannot be run; {launcher.NOT_FOUND} there is no such program."
    )

    wrong_configuration = WRONG_CONFIGURATION
    #: What stands after the first "--": argparse would drop another one in it, in some versions of Python.
    _after_dashes: list[str] | None = None

    def run_from_argv(self, argv: list[str]) -> None:
        if "--" in argv:
            at = argv.index("--")
            argv, self._after_dashes = argv[:at], argv[at + 1 :]
        super().run_from_argv(argv)

    def usage_error(self, message: str) -> str:
        if message.startswith("unrecognized arguments") and self._after_dashes is None:
            message += " (write -- between the key and the program: run_locked KEY -- CMD ARGS)"
        return message

    def add_arguments(self, parser: CommandParser) -> None:
        parser.usage = "%(prog)s [options] KEY -- CMD [ARGS ...]"
        parser.add_argument("key", type=key_argument, metavar="KEY", help="A plain key, or a canonical name.")
        parser.add_argument("command", nargs="*", metavar="CMD", help="The program and its arguments, after --.")
        self.add_backend_argument(parser, "Default: default.")
        parser.add_argument(
            "--timeout",
            type=timeout_argument,
            metavar="SECONDS",
            help="Wait so long for the lock. Default: not at all.",
        )
        parser.add_argument(
            "--ttl",
            type=lease_argument,
            metavar="SECONDS",
            help="The lock is free at most so long after this host's death. Default: the backend's.",
        )
        parser.add_argument(
            "--hold-at-least",
            type=lease_argument,
            metavar="SECONDS",
            help="Keep the lock so long, also when the program is done sooner: for hosts whose clocks differ.",
        )
        sharing = parser.add_mutually_exclusive_group()
        sharing.add_argument(
            "--slots", type=int, metavar="N", help="Let as many as N such programs run at once, on all hosts together."
        )
        sharing.add_argument(
            "--shared", action="store_true", help="Run beside others with --shared, but not beside those without."
        )
        parser.add_argument(
            "--on-refused",
            type=exit_code_argument,
            default=REFUSED,
            metavar="EXIT-CODE",
            help=f"The exit code if another holder has the lock (default {REFUSED}); with 0 nothing is printed.",
        )
        parser.add_argument(
            "--grace",
            type=lease_argument,
            default=GRACE,
            metavar="SECONDS",
            help=f"Between SIGTERM and SIGKILL if the lock is lost (default {GRACE:g}).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        [alias] = self.aliases(options["backend"] or DEFAULT_ALIAS)
        command: list[str] = [*options["command"], *(self._after_dashes or [])]
        if not command or not command[0]:
            self.wrong_usage("there is no program to run: write it after the key and --")
        try:
            leases = lock_backends.operations(alias).leases
        except ImproperlyConfigured as error:
            raise CommandError(one_line(error), returncode=WRONG_CONFIGURATION) from error
        try:
            held = lock(
                options["key"],
                timeout=options["timeout"],
                ttl=options["ttl"],
                hold_at_least=options["hold_at_least"],
                slots=options["slots"],
                shared=options["shared"],
                note=f"run_locked {os.path.basename(command[0])}",
                backend=alias,
            )
        except ValueError as error:
            self.wrong_usage(one_line(error))
        program = _Program(command, options["grace"])
        try:
            with program.forwarding():
                code = self._run(program, held, alias, options, leases)
        except _Stopped as stopped:  # also while the handlers of signals are being set
            code = BY_SIGNAL + stopped.signum
        if code:
            sys.exit(code)

    def _run(self, program: _Program, held: Lock, alias: str, options: dict[str, Any], leases: bool) -> int:
        # A refusal is logged at INFO, which a project may have on its console: cron would send a mail for each one.
        silent = _Silent() if options["on_refused"] == 0 else None
        try:
            with held as mine:
                if silent is not None:
                    silent.end()
                return program.run(mine, alias)
        except LockNotAcquiredError as refused:
            code: int = options["on_refused"]
            if code:
                raise CommandError(one_line(refused), returncode=code) from refused
            return 0
        except LockLostError as lost:
            raise CommandError(one_line(lost), returncode=LOST) from lost
        except ImproperlyConfigured as error:
            if options["hold_at_least"] is not None and not leases:
                self.wrong_usage(one_line(error))
            raise CommandError(one_line(error), returncode=WRONG_CONFIGURATION) from error
        except LockBackendError as error:
            if program.started:  # only its release failed, and the lock comes free by itself
                self.stderr.write(f"The lock could not be released: {one_line(error)}")
                return program.code
            text = f"The lock backend {alias!r} cannot be used: {one_line(error)}"
            raise CommandError(text, returncode=UNAVAILABLE) from error
        finally:
            if silent is not None:
                silent.end()


class _Silent:
    """Until its end, what the locks log at INFO is not logged."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("angee_jobs.locks")
        self._level = self._logger.level
        self._logger.setLevel(max(self._logger.getEffectiveLevel(), logging.WARNING))

    def end(self) -> None:
        self._logger.setLevel(self._level)


class _Stopped(BaseException):
    """A signal came before the program was started."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


class _Program:
    """The program, in a process group of its own, so that all it starts gets the signals too.

    On a terminal it stays in the foreground group instead, where the terminal itself sends Ctrl-C and Ctrl-\\ to it.
    """

    def __init__(self, command: list[str], grace: float) -> None:
        self._command = command
        self._grace = grace
        self._own_group = not (sys.stdin is not None and sys.stdin.isatty())
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = False
        self._early: list[int] = []
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.started = False
        self.code = 0

    @contextlib.contextmanager
    def forwarding(self) -> Any:
        """Pass signals on to the program; before it runs they end the wait for the lock."""
        before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        for signum in FORWARDED:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                before[signum] = signal.signal(signum, self._on_signal)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._process is not None:
            if self._own_group or signum not in (signal.SIGINT, signal.SIGQUIT):
                self._send(signum)
        elif self._starting:
            self._early.append(signum)
        elif not self.started:
            raise _Stopped(signum)

    def _send(self, signum: int) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._own_group:
                os.killpg(process.pid, signum)
            else:
                os.kill(process.pid, signum)

    def run(self, held: Lock, alias: str) -> int:
        """Run it to its end; its exit code. Stops it if the lock is lost, which the end of the block tells."""
        here = [sys.executable, "-I", "-S", str(Path(launcher.__file__)), str(os.getpid())]
        self._starting = self.started = True
        group = 0 if self._own_group else None
        try:
            process = subprocess.Popen([*here, *self._command], env=_environment(held, alias), process_group=group)
        except OSError as error:  # no memory, no process to be had, a key too long for an environment
            text = f"{printable(self._command[0])} cannot be run: {error.strerror}"
            raise CommandError(text, returncode=launcher.NOT_EXECUTABLE) from error
        self._process = process
        self._starting = False
        for signum in self._early:
            self._send(signum)
        # Where the system grants no thread, the end is seen a little later.
        start_thread(functools.partial(_wait, process.pid, self._ended), "run_locked waits for its program")
        while not self._ends_within(LOOK_EVERY):
            if held.lost:
                self._stop()
                break
        # Until it is reaped here, no other process can get its number, and a signal on its way cannot miss.
        self._process = None
        code = process.wait()
        self.code = BY_SIGNAL - code if code < 0 else code
        return self.code

    def _ends_within(self, seconds: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=min(left, LOOK_EVERY))
                return True
            if _has_ended(self._process.pid, os.WNOHANG):
                return True
        return False

    def _stop(self) -> None:
        """SIGTERM; SIGKILL for the program, or what it has started, if it is still there after the grace time."""
        assert self._process is not None
        deadline = time.monotonic() + self._grace
        self._send(signal.SIGTERM)
        if not self._ends_within(self._grace):
            self._send(signal.SIGKILL)
            return
        self._process.wait()
        while self._own_group and self._group_lives():
            if time.monotonic() >= deadline:
                self._send(signal.SIGKILL)
                return
            time.sleep(0.05)

    def _group_lives(self) -> bool:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, 0)
        except PermissionError:
            return True
        except ProcessLookupError:
            return False
        return True


def _environment(held: Lock, alias: str) -> dict[str, str]:
    token = {} if held.fencing_token is None else {"ANGEE_LOCK_TOKEN": str(held.fencing_token)}
    inherited = {name: value for name, value in os.environ.items() if name != "ANGEE_LOCK_TOKEN"}
    return inherited | {"ANGEE_LOCK_KEY": held.name, "ANGEE_LOCK_BACKEND": alias} | token


def _wait(pid: int, ended: queue.SimpleQueue[None]) -> None:
    _has_ended(pid)
    ended.put(None)


def _has_ended(pid: int, option: int = 0) -> bool:
    """Wait for the end of the process, or not, and leave it to be reaped by its owner."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | option) is not None
    except ChildProcessError:
        return True
