"""Import mailboxes with several workers at once: first without a lock, then with one."""

import argparse
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from ...demo.database import default_database_in
from ...demo.report import Outcome, render
from ...demo.runs import Demo, RunFailed
from ...demo.workers import WorkerDied, running_workers
from ...mbox import MboxError, checked_copy
from ...tasks import sync_channel, sync_channel_without_lock

SAMPLE = Path(__file__).resolve().parents[2] / "sample.mbox"


class Command(BaseCommand):
    help = (
        "Imports a mailbox with several real db_worker processes, first without locks and then with task_lock, "
        "and shows what became of the messages. Works in a throw-away directory; your database is not touched."
    )
    requires_system_checks = []  # they may look into the usual database; the workers run them on the demo's

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--mbox", default=str(SAMPLE), metavar="FILE", help="mbox file to import (a sample)")
        parser.add_argument("--workers", default=4, type=between(4, 32), metavar="N", help="processes (%(default)s)")
        parser.add_argument("--channels", default=2, type=between(1, 100), metavar="N", help="%(default)s")
        parser.add_argument(
            "--tasks-per-channel",
            default=6,
            type=between(2, 100),
            metavar="N",
            help="sync tasks queued at once for each channel (%(default)s)",
        )

    def handle(self, *, mbox: str, workers: int, channels: int, tasks_per_channel: int, **options: object) -> None:
        self._shown_at, self._in_line = 0.0, False
        try:
            with (
                ended_by_signals(),
                tempfile.TemporaryDirectory(prefix="angee-jobs-demo-", ignore_cleanup_errors=True) as directory,
            ):
                mailbox = str(Path(directory, "mailbox"))
                count = checked_copy(mbox, mailbox)
                self.stdout.write(f"Mailbox: {mbox!r}, {count} messages")
                self.stdout.write(f"Channels: {channels}, with {tasks_per_channel} tasks each, queued at once")
                with default_database_in(directory), running_workers(workers, directory) as pool:
                    pids = ", ".join(str(worker.process.pid) for worker in pool)
                    self.stdout.write(f"Processes: {pids}")
                    demo = Demo(
                        mailbox,
                        count,
                        channels=channels,
                        tasks_per_channel=tasks_per_channel,
                        workers=pool,
                        show=self.show,
                    )
                    demo.wait_for_workers()
                    without = demo.run("without locks", sync_channel_without_lock)
                    locked = demo.run("with task_lock", sync_channel)
        except (MboxError, WorkerDied, RunFailed, DatabaseError, OSError) as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt as error:
            raise CommandError("interrupted", returncode=130) from error
        finally:
            if self._in_line:  # what follows begins a line of its own
                self.stdout.write("")
        self.stdout.write(f"\n{render([without, locked])}\n\n", ending="")
        if locked.twice or locked.lost:
            raise CommandError("messages were imported twice or lost although a lock was used")
        self.stdout.write(moral(without))

    def show(self, text: str, *, done: bool) -> None:
        """On a terminal one line that is written over and over; elsewhere a line now and then."""
        if self.stdout.isatty():
            self.stdout.write(f"\r{text}\x1b[K", ending="\n" if done else "")
            self._in_line = not done
        elif done or time.monotonic() - self._shown_at > 1:
            self.stdout.write(text)
            self._shown_at = time.monotonic()
        self.stdout.flush()


def moral(without: Outcome) -> str:
    if not without.twice:
        return "Nothing was imported twice without locks: the workers were not in each other's way this time."
    return (
        "Without locks, workers that read the same cursor imported the same page, and moved the cursor on\n"
        "across pages that nobody had read. With the lock one worker per channel did the whole job; the\n"
        "others were refused and left."
    )


def between(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block like any other exception does, so that it is cleaned up."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    previous = {signum: signal.signal(signum, leave) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
