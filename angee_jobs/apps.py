"""The Django app."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db.backends.base.base import NO_DB_ALIAS
from django.db.backends.signals import connection_created
from django.utils.translation import gettext_lazy as _


class AngeeJobsConfig(AppConfig):
    name = "angee_jobs"
    verbose_name = _("Locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks  # noqa: F401  registers the system checks
        from .integrations.names import connect

        connect()
        connection_created.connect(_before_test_databases_go)


def _before_test_databases_go(connection: Any, **kwargs: Any) -> None:
    """A lock that a test has left held would keep its database from being dropped."""
    if connection.alias != NO_DB_ALIAS:  # that is what Django creates and drops databases with
        return
    from .locks.process import in_test_run

    if in_test_run():
        from .locks.testing.left import release_left

        release_left("The test run")
