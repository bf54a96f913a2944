"""The admin's page of held locks: shows who holds what since when, and releases by force.

``listing.py`` decides what the page shows. This module decides who may see it and release locks, and how it is
worded. A single row of the lock table has no page, because the list shows all of it that people can read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import VERSION
from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.http import HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, path, reverse
from django.utils import timezone
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..locks import LockKey
from ..locks.operations import end_session, holds_beside
from ..locks.types import printable
from ..models import TaskLock
from .listing import Inspector, Row, Target, explain, listing
from .query import REFRESH, Query
from .release import Stuck, release, write_admin_log

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern
    from django.utils.functional import Promise

#: How many holds can be released at once: as many as one page shows.
MOST_AT_ONCE = 100
#: How much of a long key is shown; a click shows all of it.
SHOWN_CHARACTERS = 120
LONGEST_REASON = 200

COLUMNS: dict[str, str | Promise] = {
    "key": gettext_lazy("Lock"),
    "holder": gettext_lazy("Holder"),
    "since": gettext_lazy("Held since"),
    "expires": gettext_lazy("Expires"),
    "token": gettext_lazy("Fencing token"),
    "backend": gettext_lazy("Backend"),
}


@admin.register(TaskLock)
class HeldLocksAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Lists the holds of all backends. A backend that does not answer shows its error; the others show their holds."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_release_permission(self, request: HttpRequest) -> bool:
        """Whether the user may free locks by force."""
        return self.has_view_permission(request) and request.user.has_perm(f"{self.opts.app_label}.release_tasklock")

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path("", wrap(self.changelist_view), name=f"{name}_changelist"),
            path("release/", wrap(self.release_view), name=f"{name}_release"),
        ]

    def _url(self, which: str) -> str:
        site, opts = self.admin_site.name, self.opts
        return reverse(f"admin:{opts.app_label}_{opts.model_name}_{which}", current_app=site)

    def _page(self, request: HttpRequest, template: str, context: dict[str, Any]) -> TemplateResponse:
        request.current_app = self.admin_site.name
        listed = VERSION >= (6, 1)  # how the admin of this Django marks its breadcrumbs up
        context = {**self.admin_site.each_context(request), "opts": self.opts, "listed_breadcrumbs": listed, **context}
        return TemplateResponse(request, f"admin/angee_jobs/tasklock/{template}.html", context)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        found = listing(Query.of(request.GET))
        query = found.query
        context = {
            "title": _("Held locks"),
            "found": found,
            "query": query,
            "rows": [self._shown(request, row) for row in found.rows],
            "columns": [_column(query, *column) for column in COLUMNS.items()],
            "filters": _filters(query, found.backends, found.kinds, found.errors),
            "refreshes": [(seconds, query.encoded(refresh=seconds), seconds == query.refresh) for seconds in REFRESH],
            "pages": _pages(query, found.pages),
            "here": query.encoded(),
            "now": timezone.now(),
            "clear": query.encoded(search="", backend="", kind=""),
            "hidden_for_search": query.hidden("search", "page"),
            "can_release": self.has_release_permission(request),
            "release_url": self._url("release"),
            "changelist_url": self._url("changelist"),
        }
        return self._page(request, "held_locks", {**context, **(extra_context or {})})

    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask for confirmation, as before a deletion, then release what was selected."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        query = Query.of(QueryDict(request.POST.get("back", "").removeprefix("?")))
        back = HttpResponseRedirect(self._url("changelist") + query.encoded())
        if request.method != "POST":
            return back
        chosen = [Target.decoded(text) for text in dict.fromkeys(request.POST.getlist("lock"))]
        targets = [target for target in chosen if target is not None]
        if len(targets) < len(chosen):
            messages.error(request, _("What was selected is not from this page, or its backend is gone."))
            return back
        if not targets:
            messages.warning(request, _("Select the locks to release first; none was."))
            return back
        if len(targets) > MOST_AT_ONCE:
            messages.error(request, _("At most %(most)d locks can be released at once.") % {"most": MOST_AT_ONCE})
            return back
        reason = " ".join(request.POST.get("reason", "").split())[:LONGEST_REASON]
        if "session" in request.POST and reason:
            self._end_session(request, targets[0], request.POST["session"], reason)
            return back
        if "confirmed" in request.POST and reason:
            stuck = self._release(request, targets, reason)
            if not stuck:
                return back
            where = {"changelist_url": self._url("changelist"), "query": query.encoded()}
            stuck_context = {"title": _("End sessions"), "stuck": stuck, "reason": reason, **where}
            return self._page(request, "end_sessions", stuck_context)
        inspector = Inspector()
        held: list[dict[str, Any]] = []
        gone: list[dict[str, Any]] = []
        for target in targets:
            row = inspector.row(target)
            if row is not None and target.fencing_token in (None, row.fencing_token):
                held.append({"target": target, "lock": self._shown(request, row)})
            elif target.backend not in inspector.errors:
                gone.append({"target": target, "now": row})
        context: dict[str, Any] = {
            "title": _("Release by force"),
            "changelist_url": self._url("changelist"),
            "query": query.encoded(),
            "locks": held,
            "gone": gone,
            "errors": inspector.errors,
            "longest_reason": LONGEST_REASON,
            "reason_missing": "confirmed" in request.POST,
        }
        return self._page(request, "release_locks", context)

    def _release(self, request: HttpRequest, targets: list[Target], reason: str) -> list[Stuck]:
        """Release each hold and tell the user; the sessions that would have to be ended to free the rest."""

        def log(target: Target) -> None:
            write_admin_log(request.user, target, reason)

        result = release(targets, user=request.user.get_username(), reason=reason, done=log)
        for alias, error in result.errors.items():
            text = _("The backend “%(backend)s” could not be asked to release all that was selected: %(error)s")
            messages.error(request, text % {"backend": alias, "error": error})
        for target in result.gone:
            text = _("%(name)s was not released: that hold was over already, and maybe the next one has begun.")
            messages.warning(request, text % {"name": Truncator(target.name).chars(SHOWN_CHARACTERS)})
        if result.done:
            text = ngettext("Released %(count)d lock by force.", "Released %(count)d locks by force.", len(result.done))
            messages.success(request, text % {"count": len(result.done)})
        return list(result.stuck.values())

    def _end_session(self, request: HttpRequest, target: Target, session: str, reason: str) -> None:
        try:
            number = int(session) if session.isdecimal() and len(session) < 10 else 0
            beside = holds_beside(target.key, backend=target.backend)
            user = request.user.get_username()
            ended = beside is not None and end_session(
                target.key, number, reason=reason, user=user, backend=target.backend
            )
        except Exception as error:
            text = _("The backend “%(backend)s” could not end the session: %(error)s")
            messages.error(request, text % {"backend": target.backend, "error": explain(error, target.backend)})
            return
        if beside is None or not ended:
            messages.warning(request, _("That session does not hold the lock any more; nothing was done."))
            return
        for info in beside[1]:
            held = Target(target.backend, info.name, info.fencing_token)
            write_admin_log(request.user, held, f"{reason} (its session was ended)")
        messages.success(request, _("Ended the session, and all its locks with it."))

    # The texts of a row.

    def _shown(self, request: HttpRequest, row: Row) -> dict[str, Any]:
        words = printable(in_words(row.key) if row.key is not None else row.name)
        ttl = row.holder.ttl if row.holder is not None else None
        return {
            "row": row,
            "words": Truncator(words).chars(SHOWN_CHARACTERS),
            "whole": row.name if len(words) > SHOWN_CHARACTERS else "",
            "name": row.name if words != row.name and len(words) <= SHOWN_CHARACTERS else "",
            "link": self._record_url(request, row.key) if row.key is not None else "",
            "ago": "" if row.held_for is None else _("%(time)s ago") % {"time": duration(row.held_for)},
            "left": "" if row.expires_in is None else _("in %(time)s") % {"time": duration(row.expires_in)},
            "ttl": _("of %(time)s") % {"time": duration(ttl)} if ttl and row.expires_in is not None else "",
            "place": _place(row),
            "endless": _("Does not expire: it ends with its holder's connection"),
        }

    def _record_url(self, request: HttpRequest, key: LockKey) -> str:
        """The admin page of the record that ``key`` is about; empty if there is none that this user may see."""
        model = _model_of(key)
        if model is None or len(key.parts) != 3 or not self.admin_site.is_registered(model):
            return ""
        if not self.admin_site.get_model_admin(model).has_view_permission(request):
            return ""
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
        try:
            return reverse(name, args=[quote(key.parts[1])], current_app=self.admin_site.name)
        except (NoReverseMatch, UnicodeEncodeError):  # a lone surrogate, which no record's key can have
            return ""


def _model_of(key: LockKey) -> Any:
    if key.namespace != "record" or "." not in key.parts[0]:
        return None
    try:
        return apps.get_model(key.parts[0])
    except (LookupError, ValueError):
        return None


def _place(row: Row) -> str:
    slots = 0 if row.holder is None else row.holder.places
    if row.place is None:
        return _("shared") if slots < 0 else ""
    return _("place %(place)d of %(slots)d") % {"place": row.place + 1, "slots": max(slots, row.place + 1)}


def in_words(key: LockKey) -> str:
    """A key, written for people."""
    if key.namespace == "name" and len(key.parts) == 1:
        return key.parts[0]
    if key.namespace == "record" and len(key.parts) >= 3:
        label, *pk, purpose = key.parts
        model = _model_of(key)
        name = str(model._meta.verbose_name) if model is not None else label
        return f"{name} {', '.join(pk)}: {purpose}"
    return f"{key.namespace}: {', '.join(key.parts)}"


def duration(seconds: float) -> str:
    """The two leading units of a length of time: ``3 min 20 s``."""
    left = max(0, round(seconds))
    texts: list[str] = []
    for size, text in ((86400, _("%d d")), (3600, _("%d h")), (60, _("%d min")), (1, _("%d s"))):
        count, left = divmod(left, size)
        texts.append(text % count if count else "")
    first = next((at for at, text in enumerate(texts) if text), None)
    return _("%d s") % 0 if first is None else " ".join(filter(None, texts[first : first + 2]))


def _column(query: Query, order: str, label: str | Promise) -> dict[str, Any]:
    ascending, descending = query.order == order, query.order == f"-{order}"
    return {
        "label": label,
        "url": query.encoded(order=f"-{order}" if ascending else order),
        "sorted": "ascending" if ascending else "descending" if descending else "",
        "other_way": query.encoded(order=order if descending else f"-{order}"),
        "unsorted": query.encoded(order="since"),
    }


def _filters(query: Query, backends: Any, kinds: Any, errors: dict[str, str]) -> list[dict[str, Any]]:
    def choice(label: Any, selected: bool, url: str, count: int | None = None, failed: bool = False) -> dict[str, Any]:
        return {"label": label, "selected": selected, "url": url, "count": count, "failed": failed}

    by_backend = [choice(_("All"), not query.backend, query.encoded(backend=""))]
    for alias, count in backends.items():
        asked = not query.backend or query.backend == alias
        known = count if asked and alias not in errors else None
        by_backend.append(
            choice(alias, query.backend == alias, query.encoded(backend=alias), known, failed=alias in errors)
        )
    by_kind = [choice(_("All"), not query.kind, query.encoded(kind=""))]
    for kind in sorted({*kinds, *filter(None, [query.kind])}):
        by_kind.append(choice(kind or _("none"), query.kind == kind, query.encoded(kind=kind), kinds[kind]))
    return [
        {"title": _("backend"), "choices": by_backend},
        {"title": _("kind of key"), "choices": by_kind[:50]},
    ]


def _pages(query: Query, pages: int) -> list[dict[str, Any]]:
    """Links to the first, the last and the nearest pages; an entry with the number 0 is a gap."""
    if pages == 1:
        return []
    shown = sorted({1, pages, *range(max(1, query.page - 3), min(pages, query.page + 3) + 1)})
    links: list[dict[str, Any]] = []
    for number in shown:
        if links and number != links[-1]["number"] + 1:
            links.append({"number": 0})
        links.append({"number": number, "url": query.encoded(page=number), "current": number == query.page})
    return links
