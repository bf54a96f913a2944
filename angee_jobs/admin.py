"""The admin's list of held locks, read through the backends: only they know what is held."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from .locks import LockError, held_locks, lock_backends
from .models import TaskLock

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

#: More rows than a person reads; the page says when there are more.
MOST_ROWS = 500


@admin.register(TaskLock)
class HeldLocksAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Read-only. A backend that cannot be asked shows its error in its place; the others still show their locks."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        sections = []
        for alias in lock_backends:
            section: dict[str, Any] = {"alias": alias, "locks": [], "more": False, "error": ""}
            try:
                locks = list(itertools.islice(held_locks(backend=alias), MOST_ROWS + 1))
                section["locks"], section["more"] = locks[:MOST_ROWS], len(locks) > MOST_ROWS
            except (LockError, ImproperlyConfigured) as error:
                section["error"] = str(error)
            sections.append(section)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Held locks"),
            "opts": self.opts,
            "sections": sections,
            "most_rows": MOST_ROWS,
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/angee_jobs/tasklock/held_locks.html", context)
