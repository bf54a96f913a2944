"""What the page of held locks shows, without anything of the page: read, search, sort, cut to a page.

Holds are read through the backends, which give them one by one, and only the rows of the asked page are kept: so the
time grows with the number of holds (see docs/operations.md for figures) and the memory does not. A backend that
cannot be asked costs its error and at most ``BACKEND_SECONDS``; whatever there is, a page costs about
``PAGE_SECONDS`` at most.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import ImproperlyConfigured

from .locks import clock
from .locks.backends.base import BaseLockBackend, Record, to_datetime
from .locks.conf import lock_backends
from .locks.errors import LockError
from .locks.holder import parse_holder
from .locks.keys import PREFIX, LockKey
from .locks.operations import held_records
from .locks.types import Holder

logger = logging.getLogger("angee_jobs.locks")

PAGE_ROWS = 100
#: What one backend that does not answer, and what all of them together, may cost, in seconds.
BACKEND_SECONDS, PAGE_SECONDS = 4.0, 6.0
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
    best = _Best(query.order, query.page * PAGE_ROWS)
    _read(found, best)
    page = min(query.page, found.pages)
    found.query = dataclasses.replace(query, page=page)
    records = best.in_order()
    now = clock_of(records)
    found.rows = [_row(record, alias, now) for record, alias in records[(page - 1) * PAGE_ROWS :][:PAGE_ROWS]]
    return found


class _Best:
    """The first so-many records in the asked order, of however many are added.

    Most of many records are worse than what is there already, and cost one comparison. Unknown values come last.
    """

    def __init__(self, order: str, keep: int) -> None:
        self._descending = order.startswith("-")
        self._value_of = ORDERS[order.removeprefix("-")]
        self._keep = keep
        self._known: list[tuple[Any, str, str, Record]] = []
        self._unknown: list[tuple[str, str, Record]] = []
        self._limit: Any = None

    def add(self, record: Record, alias: str) -> None:
        value = self._value_of(record, alias)
        if value is None:
            self._unknown.append((record.name, alias, record))
            return
        limit = self._limit
        if limit is not None and (value < limit if self._descending else value > limit):
            return
        self._known.append((value, record.name, alias, record))
        if len(self._known) >= 2 * self._keep + 1000:
            self._cut()
            self._limit = self._known[-1][0]

    def _cut(self) -> None:
        self._known.sort(key=lambda entry: entry[:3], reverse=self._descending)
        del self._known[self._keep :]

    def in_order(self) -> list[tuple[Record, str]]:
        self._cut()
        unknown = sorted(self._unknown, key=lambda entry: entry[:2]) if len(self._known) < self._keep else []
        ordered = [(record, alias) for _, _, alias, record in self._known]
        return [*ordered, *((record, alias) for _, alias, record in unknown)]


def kind_of(name: str) -> str:
    """The namespace of a lock's name, as it is spelled there; empty if it is no lock's name."""
    end = name.find(":", len(PREFIX))
    return name[len(PREFIX) : end] if end > 0 and name.startswith(PREFIX) else ""


def _read(found: Listing, best: _Best) -> None:
    """Put what matches into ``best``, and into ``found`` what there is."""
    end = clock.now() + PAGE_SECONDS
    try:
        aliases = list(lock_backends)
    except ImproperlyConfigured as error:
        found.misconfigured = str(error)
        return
    query = found.query
    found.backends.update(dict.fromkeys(aliases, 0))
    for alias in aliases:
        if not query.backend or alias == query.backend:
            try:
                _read_backend(found, best, alias, end)
            except Exception as error:
                found.errors[alias] = explain(error, alias)


def _read_backend(found: Listing, best: _Best, alias: str, end: float) -> None:
    kind_wanted, matches = found.query.kind, _search(found.query.search)
    limit = min(BACKEND_SECONDS, max(0.1, end - clock.now()))
    kinds: Counter[str] = found.kinds
    read = matching = 0
    try:
        for record in held_records(alias, limit):
            if read % LOOK_EVERY == LOOK_EVERY - 1 and clock.now() > end:
                found.unfinished.append(alias)
                break
            read += 1
            kind = kind_of(record.name)
            kinds[kind] += 1
            if (not kind_wanted or kind_wanted == kind) and (matches is None or matches(record)):
                matching += 1
                best.add(record, alias)
    finally:
        found.read += read
        found.backends[alias] += read
        found.matching += matching


def explain(error: Exception, alias: str) -> str:
    """What to show of an error of a backend. Of a stranger's not the text: it may have a password in it."""
    if isinstance(error, (LockError, ImproperlyConfigured)):
        return str(error)
    logger.error("The lock backend %r failed", alias, exc_info=error)
    return f"{type(error).__name__}; the log says more"


def _search(text: str) -> Callable[[Record], bool] | None:
    """Whether every word of ``text`` is in the key or the holder, in any case; None: there are no words."""
    words = text.casefold().split()
    if not words:
        return None
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


def clock_of(records: Sequence[tuple[Record, str]]) -> dict[str, float]:
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
