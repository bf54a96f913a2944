"""The tables of the locks. Only the backends and ``guard()`` write to them.

Columns that change when a lock is taken, renewed or released have no index, so that PostgreSQL can update a row in
place (HOT); see docs/decisions/010-lock-table-rows.md. On SQLite the lock table is a file of its own beside the
database, and the table of :class:`TaskLock` in the database stays empty. To see or remove holds, ask the backend
(``held_locks()``, ``reap_expired_locks()``), never ``TaskLock.objects``.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _


class TaskLock(models.Model):
    """One key of the lock table: held, expired, or free with its last fencing token."""

    digest = models.CharField(_("digest of the name"), max_length=64, primary_key=True)
    name = models.TextField(_("name"))
    owner = models.CharField(_("hash of the owner id"), max_length=64, help_text=_("Empty: nobody holds it."))
    holder = models.TextField(_("holder"), help_text=_("Host, process, thread and task, as JSON."))
    acquired_at = models.DateTimeField(_("acquired at"))
    expires_at = models.DateTimeField(_("expires at"), help_text=_("Of a free lock: when it was released."))
    fencing_token = models.BigIntegerField(_("fencing token"))
    waited_until = models.DateTimeField(
        _("waited for until"), null=True, help_text=_("A release before this moment tells the waiters.")
    )

    class Meta:
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        default_permissions = ("view",)
        permissions: ClassVar = [("release_tasklock", _("Can release held locks by force"))]

    def __str__(self) -> str:
        return self.name


class LockMember(models.Model):
    """One place of a key that several may hold, or one of its shared holds: held, expired, or free.

    While members live, the row of the key in :class:`TaskLock` has ``*`` for its owner, and ends with the last of them.
    The row with the number -1 is the word of an exclusive waiter.
    """

    pk = models.CompositePrimaryKey("digest", "number")
    digest = models.CharField(_("digest of the name"), max_length=64)
    number = models.IntegerField(_("place"), help_text=_("From 1000 on: a shared hold."))
    name = models.TextField(_("name"))
    owner = models.CharField(_("hash of the owner id"), max_length=64, help_text=_("Empty: nobody holds it."))
    holder = models.TextField(_("holder"), help_text=_("Host, process, thread and task, as JSON."))
    acquired_at = models.DateTimeField(_("acquired at"))
    expires_at = models.DateTimeField(_("expires at"), help_text=_("Of a free place: when it was released."))
    fencing_token = models.BigIntegerField(_("fencing token"))

    class Meta:
        verbose_name = _("place of a lock")
        verbose_name_plural = _("places of locks")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name


class SessionHold(models.Model):
    """What ``pg_locks`` does not know about a session lock: its name, and who holds it.

    A row is not the lock. It counts only while the server session that it names holds the advisory lock. The background
    thread writes a row for each hold that has lasted a second, and removes the rows of sessions that are gone.
    """

    advisory_key = models.BigIntegerField(_("advisory lock key"), primary_key=True)
    server_pid = models.IntegerField(_("server process"))
    name = models.TextField(_("name"))
    holder = models.TextField(_("holder"))
    acquired_at = models.DateTimeField(_("acquired at"))
    fencing_token = models.BigIntegerField(_("fencing token"))

    class Meta:
        verbose_name = _("session lock")
        verbose_name_plural = _("session locks")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name


class LockGuard(models.Model):
    """The highest fencing token of one key whose guarded transaction was committed in this database."""

    digest = models.CharField(_("digest of the name"), max_length=64, primary_key=True)
    name = models.TextField(_("name"))
    fencing_token = models.BigIntegerField(_("fencing token"))
    passed_at = models.DateTimeField(_("passed at"), db_index=True)

    class Meta:
        verbose_name = _("guard")
        verbose_name_plural = _("guards")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name
