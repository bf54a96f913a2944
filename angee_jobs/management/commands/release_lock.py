"""``manage.py release_lock``: free a lock by force."""

from __future__ import annotations

import getpass
from typing import Any

from django.core.management.base import CommandError, CommandParser

from angee_jobs.locks.conf import DEFAULT_ALIAS
from angee_jobs.locks.errors import LockBackendError
from angee_jobs.locks.keys import LockKey
from angee_jobs.locks.operations import end_session, force_release, holds_beside, lock_info, task_lock_is_held
from angee_jobs.management.base import BACKEND_ERRORS, LockCommand, key_argument, one_line

NOT_HELD = 3
STUCK = 4


class Command(LockCommand):
    help = (
        "Frees a lock by force, whoever holds it. The holder is NOT stopped: see first whether it still runs. "
        "Exit codes: 0 released; 1 the backend could not be asked; 2 wrong usage; 3 nobody held the lock; 4 its "
        "process does not give it up, and only ending its database session would help."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "key", type=key_argument, metavar="NAME", help="As list_locks shows it, or a plain key as it is."
        )
        self.add_backend_argument(parser, "Default: default.")
        parser.add_argument("--reason", default="", help="Why; it is logged, with the name of the user.")

        parser.add_argument(
            "--end-session",
            type=int,
            metavar="PID",
            help="End the database session PID that holds the lock, and all its other locks with it.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        key: LockKey = options["key"]
        [alias] = self.aliases(options["backend"] or DEFAULT_ALIAS)
        try:
            info = lock_info(key, backend=alias)
            token = None if info is None else info.fencing_token
            how = {"reason": options["reason"], "user": _user(), "backend": alias}
            if options["end_session"] is not None:
                if holds_beside(key, backend=alias) is None and info is not None:
                    self.wrong_usage(f"the locks of {alias!r} do not hang on sessions")
                released = info is not None and end_session(key, options["end_session"], **how)
            else:
                released = info is not None and self._force(key, token, how)
        except BACKEND_ERRORS as error:
            raise CommandError(f"The lock backend {alias!r} could not be asked: {one_line(error)}") from error
        if not released or info is None:
            elsewhere = self._elsewhere(key, alias) if options["backend"] is None else ""
            raise CommandError(f"Nobody holds {key.name} in the backend {alias!r}.{elsewhere}", returncode=NOT_HELD)
        holder = "" if info.holder is None else f", which {info.holder} held"
        self.stdout.write(f"Released {key.name}{holder}. The holder was not stopped.")

    def _force(self, key: LockKey, token: int | None, how: dict[str, Any]) -> bool:
        try:
            return force_release(key, fencing_token=token, **how)
        except LockBackendError as error:
            beside = holds_beside(key, backend=how["backend"])
            if beside is None:
                raise
            session, infos = beside
            others = ", ".join(info.name for info in infos if info.name != key.name) or "no other lock"
            raise CommandError(
                f"The process that holds {key.name} does not give it up. --end-session {session} ends its database "
                f"session, and with it: {others}",
                returncode=STUCK,
            ) from error

    def _elsewhere(self, key: LockKey, but: str) -> str:
        """Which backend was meant, maybe."""
        for alias in self.aliases(None):
            try:
                if alias != but and task_lock_is_held(key, backend=alias):
                    return f" It is held in {alias!r}: use --backend {alias}."
            except BACKEND_ERRORS:
                pass
        return ""


def _user() -> str:
    try:
        return f"{getpass.getuser()}, on the command line"
    except (OSError, KeyError):  # a container whose user has no name
        return "the command line"
