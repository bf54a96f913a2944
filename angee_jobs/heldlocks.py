"""What the page of held locks shows, without anything of the page: read, search, sort, cut to a page, release.

Holds are read through the backends, which give them one by one, and only the rows of the asked page are kept: so the
time grows with the number of holds (see docs/operations.md for figures) and the memory does not. A backend that
cannot be asked costs its error and at most ``BACKEND_SECONDS``; whatever there is, a page costs ``PAGE_SECONDS``.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import ImproperlyConfigured

from .locks import clock
from .locks.backends.base import BaseLockBackend, Record, parse_holder, to_datetime
from .locks.conf import lock_backends
from .locks.errors import LockError
from .locks.keys import LockKey
from .locks.operations import held_records
from .locks.types import Holder

logger = logging.getLogger("angee_jobs.locks")

PAGE_ROWS = 100
#: What one backend that does not answer, and what all of them together, may cost, in seconds.
BACKEND_SECONDS, PAGE_SECONDS = 2.0, 6.0
#: The clock is looked at every so-many holds.
LOOK_EVERY = 1000
#: What the page offers to reload itself after, in seconds; 0: not at all.
REFRESH = (0, 5, 15, 60)

#: By what the rows can be sorted. None comes last either way.
ORDERS: Mapping[str, Callable[[Record, str], Any]] = {
    "key": lambda record, alias: record.name,
    "holder": lambda record, alias: record.holder,
    "since": lambda record, alias: record.acquired_at,
    "expires": lambda record, alias: record.expires_in,
    "token": lambda record, alias: record.fencing_token,
    "backend": lambda record, alias: alias,
}
#: Words that stand in the stored form of a holder as they were typed.
_PLAIN = re.compile(r"[\w.@/+-]+", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """What was asked for. Nonsense in a parameter counts as its default, as in a bookmark of another day."""

    search: str = ""
    backend: str = ""
    kind: str = ""
    order: str = "since"  # the oldest first: they are why somebody looks
    page: int = 1
    refresh: int = 0

    _NAMES = {"search": "q", "backend": "backend", "kind": "kind", "order": "o", "page": "p", "refresh": "refresh"}

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Query:
        texts = {field: parameters.get(name, "") for field, name in cls._NAMES.items()}
        order, page, refresh = texts["order"], texts["page"], texts["refresh"]
        return cls(
            search=texts["search"].strip(),
            backend=texts["backend"],
            kind=texts["kind"],
            order=order if order.removeprefix("-") in ORDERS else "since",
            page=max(1, int(page)) if re.fullmatch(r"[0-9]{1,9}", page) else 1,
            refresh=int(refresh) if refresh in map(str, REFRESH) else 0,
        )

    def encoded(self, **changes: Any) -> str:
        """``?...`` for a link; a change of anything but the page or the refresh goes to the first page."""
        if changes.keys() - {"page", "refresh"}:
            changes.setdefault("page", 1)
        new, usual = dataclasses.replace(self, **changes), Query()
        given = {
            name: getattr(new, field)
            for field, name in self._NAMES.items()
            if getattr(new, field) != getattr(usual, field)
        }
        return "?" + urlencode(given)

    def hidden(self, *but: str) -> dict[str, Any]:
        """What a form sends along that changes the fields ``but``."""
        usual = Query()
        return {
            name: getattr(self, field)
            for field, name in self._NAMES.items()
            if field not in but and getattr(self, field) != getattr(usual, field)
        }


@dataclasses.dataclass(slots=True)
class Row:
    """One hold of the page."""

    backend: str
    name: str
    key: LockKey | None  # None: somebody wrote a name that is none
    holder: Holder | None
    acquired_at: datetime | None
    held_for: float | None  # seconds, by the backend's clock where it can be told
    expires_at: datetime | None
    expires_in: float | None
    fencing_token: int | None

    @property
    def target(self) -> str:
        return Target(self.backend, self.name, self.fencing_token).encoded()


@dataclasses.dataclass(slots=True)
class Listing:
    """A page of holds, and what is known of the others."""

    query: Query
    rows: list[Row] = dataclasses.field(default_factory=list)
    matching: int = 0
    read: int = 0
    #: How many holds each backend, and of the chosen backends each kind, has.
    backends: Counter[str] = dataclasses.field(default_factory=Counter)
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)
    #: By alias: why a backend could not be asked, or not to the end.
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Backends that have more holds than could be read in time.
    unfinished: list[str] = dataclasses.field(default_factory=list)
    #: Why there is not even a list of backends.
    misconfigured: str = ""

    @property
    def pages(self) -> int:
        return max(1, -(-self.matching // PAGE_ROWS))


def listing(query: Query) -> Listing:
    """The page that ``query`` asks for; the last one if there are fewer pages."""
    found = Listing(query)
    key = _sort_key(query.order)
    pick = heapq.nlargest if query.order.startswith("-") else heapq.nsmallest
    records = pick(query.page * PAGE_ROWS, _matching(found), key=key)
    page = min(query.page, found.pages)
    found.query = dataclasses.replace(query, page=page)
    now = clock_of(records)
    found.rows = [_row(record, alias, now) for record, alias in records[(page - 1) * PAGE_ROWS :][:PAGE_ROWS]]
    return found


def kind_of(name: str) -> str:
    """The namespace of a lock's name, as it is spelled there."""
    pieces = name.split(":", 2)
    return pieces[1] if len(pieces) == 3 else ""


def _matching(found: Listing) -> Iterator[tuple[Record, str]]:
    """The holds that match, counted on the way."""
    query, matches = found.query, _search(found.query.search)
    for record, alias in _read(found):
        kind = kind_of(record.name)
        found.kinds[kind] += 1
        if (not query.kind or query.kind == kind) and matches(record):
            found.matching += 1
            yield record, alias


def _read(found: Listing) -> Iterator[tuple[Record, str]]:
    end = clock.now() + PAGE_SECONDS
    try:
        aliases = list(lock_backends)
    except ImproperlyConfigured as error:
        found.misconfigured = str(error)
        return
    wanted = found.query.backend
    for alias in aliases:
        found.backends[alias] = 0
    for alias in aliases:
        if wanted and alias != wanted:
            continue
        try:
            limit = min(BACKEND_SECONDS, max(0.1, end - clock.now()))
            for count, record in enumerate(held_records(alias, limit)):
                if count % LOOK_EVERY == LOOK_EVERY - 1 and clock.now() > end:
                    found.unfinished.append(alias)
                    break
                found.read += 1
                found.backends[alias] += 1
                yield record, alias
        except Exception as error:
            found.errors[alias] = explain(error, alias)


def explain(error: Exception, alias: str) -> str:
    """What to show of an error of a backend. Of a stranger's not the text: it may have a password in it."""
    if isinstance(error, (LockError, ImproperlyConfigured)):
        return str(error)
    logger.error("The lock backend %r failed", alias, exc_info=error)
    return f"{type(error).__name__}; the log says more"


def _sort_key(order: str) -> Callable[[tuple[Record, str]], Any]:
    value_of, descending = ORDERS[order.removeprefix("-")], order.startswith("-")

    def key(item: tuple[Record, str]) -> Any:
        record, alias = item
        value = value_of(record, alias)
        if value is None:
            return not descending, 0, record.name, alias
        return descending, value, record.name, alias

    return key


def _search(text: str) -> Callable[[Record], bool]:
    """Whether every word of ``text`` is in the key or the holder, in any case."""
    words = text.casefold().split()
    if not words:
        return lambda record: True
    plain = [word for word in words if _PLAIN.fullmatch(word)]

    def matches(record: Record) -> bool:
        stored = f"{record.name}\n{record.holder}".casefold()
        if not all(word in stored for word in plain):
            return False  # the usual case among many, without reading the holder
        shown = f"{record.name}\n{parse_holder(record.holder) or ''}"
        if "%" in record.name:
            shown += "\n" + " ".join(pieces(record.name))
        shown = shown.casefold()
        return all(word in shown for word in words)

    return matches


def pieces(name: str) -> list[str]:
    """The namespace and the parts of a lock's name; the name alone if it is none."""
    key = parse_key(name)
    return [name] if key is None else [key.namespace, *key.parts]


def parse_key(name: str) -> LockKey | None:
    try:
        return LockKey.parse(name)
    except ValueError:
        return None


def clock_of(records: list[tuple[Record, str]]) -> dict[str, float]:
    """What time it is at each backend, which a lease tells; the page's own clock may be wrong."""
    return {
        alias: record.expires_at - record.expires_in
        for record, alias in records
        if record.expires_at is not None and record.expires_in is not None
    }


def _row(record: Record, alias: str, now: dict[str, float]) -> Row:
    at = now.get(alias, time.time())
    return Row(
        backend=alias,
        name=record.name,
        key=parse_key(record.name),
        holder=parse_holder(record.holder),
        acquired_at=to_datetime(record.acquired_at),
        held_for=None if record.acquired_at is None else max(0.0, at - record.acquired_at),
        expires_at=to_datetime(record.expires_at),
        expires_in=record.expires_in,
        fencing_token=record.fencing_token,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One hold that somebody saw and wants to end: the fencing token tells it from the key's next hold."""

    backend: str
    name: str
    fencing_token: int | None

    def encoded(self) -> str:
        return json.dumps([self.backend, self.fencing_token, self.name])

    @classmethod
    def decoded(cls, text: str) -> Target | None:
        """None for what the page did not write."""
        try:
            backend, token, name = json.loads(text)
            if backend not in lock_backends or not (token is None or type(token) is int):
                return None
            return cls(backend, LockKey.parse(name).name, token)
        except (ValueError, TypeError, RecursionError, ImproperlyConfigured):
            return None

    @property
    def key(self) -> LockKey:
        return LockKey.parse(self.name)

    def verbs(self) -> BaseLockBackend:
        return lock_backends.verbs(self.backend)


class Inspector:
    """Looks at targets one by one; a backend that failed once is not asked again."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def row(self, target: Target) -> Row | None:
        """The hold that the key has now, maybe another one; None if none, or if the backend is in ``errors``."""
        if target.backend in self.errors:
            return None
        try:
            record = target.verbs().inspect(target.name, clock.now() + BACKEND_SECONDS)
        except Exception as error:
            self.errors[target.backend] = explain(error, target.backend)
            return None
        if record is None:
            return None
        item = (record, target.backend)
        return _row(*item, clock_of([item]))
