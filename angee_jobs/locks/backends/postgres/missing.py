"""Why the tables of the locks are missing on a database, as far as the settings tell."""

from __future__ import annotations


def remedy(alias: str) -> str:
    """What to do, as a sentence without its end. ``migrate`` alone would not help where it may not make the tables."""
    from django.apps import apps
    from django.db import router

    migrate = f"run manage.py migrate angee_jobs --database {alias}"
    if not apps.is_installed("angee_jobs"):
        return f'add "angee_jobs" to INSTALLED_APPS, then {migrate}'
    from ....models import TaskLock

    if not router.allow_migrate_model(alias, TaskLock):
        return (
            f"let allow_migrate() of DATABASE_ROUTERS return True for the app angee_jobs on {alias!r}, then {migrate}; "
            f"or give the lock backend an alias where they allow it"
        )
    return migrate


def plain(alias: str) -> bool:
    """Whether ``migrate`` makes the tables."""
    return remedy(alias).startswith("run ")
