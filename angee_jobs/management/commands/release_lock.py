"""``manage.py release_lock``: free a lock by force."""

from __future__ import annotations

import getpass
from typing import Any

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError

from angee_jobs.admin.listing import Target
from angee_jobs.admin.release import write_admin_log
from angee_jobs.locks.conf import DEFAULT_ALIAS
from angee_jobs.locks.errors import LockBackendError
from angee_jobs.locks.keys import LockKey
from angee_jobs.locks.operations import end_session, force_release, holds_beside, lock_info, task_lock_is_held
from angee_jobs.locks.types import LockInfo, printable
from angee_jobs.management.base import BACKEND_ERRORS, LockCommand, key_argument, one_line

NOT_HELD = 3
STUCK = 4


class Command(LockCommand):
    help = (
        "Frees a lock by force; of several holders, one. The holder is NOT stopped: see first whether it still runs. "
        "Exit codes: 0 released; 1 the backend could not be asked; 2 wrong usage; 3 the lock was not held; 4 its "
        "process does not give it up, and only ending its database session would help."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "key", type=key_argument, metavar="NAME", help="As list_locks shows it, or a plain key as it is."
        )
        self.add_backend_argument(parser, "Default: default.")
        parser.add_argument("--reason", default="", help="Why; it is logged, with the name of the user.")
        parser.add_argument(
            "--user", metavar="NAME", help="A user of the site, in whose name it also goes to the log of the admin."
        )
        parser.add_argument(
            "--end-session",
            type=int,
            metavar="PID",
            help="End the database session PID that holds the lock, and all its other locks with it.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        key: LockKey = options["key"]
        name = printable(key.name)
        [alias] = self.aliases(options["backend"] or DEFAULT_ALIAS)
        user = None if options["user"] is None else self._user(options["user"])
        how = {"reason": options["reason"], "user": _who(options["user"]), "backend": alias}
        session = options["end_session"]
        try:
            info = lock_info(key, backend=alias)
            beside = None if session is None else holds_beside(key, backend=alias)
            if session is not None:
                if beside is None and info is not None:
                    self.wrong_usage(f"the locks of {alias!r} do not hang on sessions")
                released = info is not None and end_session(key, session, **how)
                if not released and beside is not None and beside[0] != session:
                    raise CommandError(
                        f"The session {session} does not hold {name}: the session {beside[0]} does.",
                        returncode=NOT_HELD,
                    )
            else:
                released = info is not None and self._force(key, info.fencing_token, how)
        except BACKEND_ERRORS as error:
            raise CommandError(f"The lock backend {alias!r} could not be asked: {one_line(error)}") from error
        if not released or info is None:
            elsewhere = self._elsewhere(key, alias) if options["backend"] is None else ""
            raise CommandError(f"{name} is not held in the backend {alias!r}.{elsewhere}", returncode=NOT_HELD)
        holder = "" if info.holder is None else f", which {info.holder} held"
        ended = [info]
        if beside is None:
            self.stdout.write(f"Released {name}{holder}. The holder was not stopped.")
        else:
            others = [each for each in beside[1] if each.name != key.name]
            ended += others
            self.stdout.write(
                f"Released {name}{holder}, by ending the database session {session}, and with it "
                f"{_names(others)}. The process was not stopped, but all these locks are lost to it."
            )
        if user is not None:
            self._write_admin_log(user, ended, options["reason"])

    def _user(self, name: str) -> Any:
        """The user of that name, or None where there is no log of the admin; wrong usage if there is no such user."""
        if not apps.is_installed("django.contrib.admin"):
            return None
        users = get_user_model()
        try:
            return users._default_manager.get_by_natural_key(name)
        except users.DoesNotExist:
            self.wrong_usage(f"there is no user {name!r}")
        except DatabaseError as error:
            raise CommandError(f"The user {name!r} could not be looked up: {one_line(error)}") from error

    def _write_admin_log(self, user: Any, ended: list[LockInfo], reason: str) -> None:
        """One that cannot be written is only told: the lock is free already."""
        try:
            for info in ended:
                write_admin_log(user, Target(info.backend, info.name, info.fencing_token), reason or "no reason given")
        except DatabaseError as error:
            self.stderr.write(f"The log of the admin could not be written: {one_line(error)}")

    def _force(self, key: LockKey, token: int | None, how: dict[str, Any]) -> bool:
        try:
            return force_release(key, fencing_token=token, **how)
        except LockBackendError as error:
            beside = holds_beside(key, backend=how["backend"])
            if beside is None:
                raise
            session, infos = beside
            others = _names([info for info in infos if info.name != key.name])
            raise CommandError(
                f"The process that holds {printable(key.name)} does not give it up. --end-session {session} ends its "
                f"database session, and with it: {others}",
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


def _names(infos: list[LockInfo]) -> str:
    return ", ".join(printable(info.name) for info in infos) or "no other lock"


def _who(user: str | None) -> str:
    try:
        who = f"{getpass.getuser()}, on the command line"
    except (OSError, KeyError):  # a container whose user has no name
        who = "the command line"
    return who if user is None else f"{user} ({who})"
