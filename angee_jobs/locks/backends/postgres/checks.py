"""System checks that ask PostgreSQL: for ``manage.py check --database``, and ``migrate``."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from django.core.checks import Error, Warning
from django.core.exceptions import ImproperlyConfigured

from ... import clock
from ..base import OPERATION_SECONDS
from .errors import NoAnswer, SessionLost
from .missing import plain, remedy
from .session import Session
from .statements import Statement

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.core.checks import CheckMessage

_MISSING = Statement("""
    SELECT what FROM unnest($1::text::text[]) AS what WHERE to_regclass(what) IS NULL ORDER BY what
""")


def check_postgres(
    alias: str, needs: Collection[str], databases: Collection[str], refuse: Callable[[Session, float], None] | None
) -> list[CheckMessage]:
    """Whether the tables and sequences in ``needs`` are there, and whether ``refuse`` raises on a pooled session.

    Nothing if the operator did not ask about ``alias``, or if it cannot be reached: that is Django's to report.
    """
    if alias not in databases:
        return []
    deadline = clock.now() + OPERATION_SECONDS
    try:
        session = Session(alias, deadline)
    except (SessionLost, NoAnswer, ImproperlyConfigured):
        return []
    from psycopg import Error as DriverError

    from ...errors import LockBackendError

    problems: list[CheckMessage] = []
    try:
        if refuse is not None and not session.direct:
            refuse(session, deadline)
        rows = session.execute(_MISSING, ["{" + ",".join(needs) + "}"], deadline)
        missing = [row[0].decode() for row in rows if row[0]]
        if missing and not (_migrating() and plain(alias)):
            sentence = remedy(alias)
            problems.append(
                Warning(
                    f"The database {alias!r} lacks {', '.join(missing)}, which its locks need.",
                    hint=f"{sentence[0].upper()}{sentence[1:]}.",
                    id="angee_jobs.W001",
                )
            )
    except LockBackendError as error:
        what, _, hint = str(error).partition(". ")
        problems.append(Error(what + ".", hint=hint, id="angee_jobs.E003"))
    except (SessionLost, NoAnswer, DriverError):
        pass
    finally:
        session.close()
    return problems


def _migrating() -> bool:
    """Whether this process is the command that makes the tables, which checks first, and calls itself ``migrate``."""
    return any(word.startswith("migrate") for word in sys.argv[1:2])  # also migrate_schemas of django-tenants
