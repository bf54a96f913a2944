"""Read, search and sort what the page of held locks shows, and cut it to a page. Does not know of requests.

Of every hold, read only its name and what it is sorted and searched by. Read the rest for the rows of the page. So the
time grows slowly with the number of holds (see docs/operations.md for figures). A backend that does not answer costs
``BACKEND_SECONDS`` at most, and the whole page about ``PAGE_SECONDS``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..locks import clock
from ..locks.backends.base import BaseLockBackend, Record, to_datetime
from ..locks.conf import lock_backends
from ..locks.errors import LockError
from ..locks.holder import parse_holder
from ..locks.keys import PREFIX, SCOPED, LockKey
from ..locks.operations import about_to_ask
from ..locks.types import Holder
from .query import ORDERS, Query, parse_key, searcher

logger = logging.getLogger("angee_jobs.locks")

PAGE_ROWS = 100
#: How long to wait for one backend, and for all of them together, in seconds.
BACKEND_SECONDS, PAGE_SECONDS = 4.0, 6.0
#: Of a backend that gives whole records only: read this many, then look at the clock.
LOOK_EVERY = 1000
#: A hold as far as it has been read: its name, the value that it is sorted by, its holder if holders are searched, and
#: its record if the backend gave one.
Scanned = tuple[str, Any, str | None, Record | None]


@dataclasses.dataclass(slots=True)
class Row:
    """One hold of the page."""

    backend: str
    name: str
    key: LockKey | None  # None: the storage has a name that is no lock's, written by hand
    holder: Holder | None
    acquired_at: datetime | None
    held_for: float | None  # seconds, by the backend's clock if that is known
    expires_at: datetime | None
    expires_in: float | None
    fencing_token: int | None
    place: int | None

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
    #: How many holds each backend has; and of each kind, how many holds the chosen backends have.
    backends: Counter[str] = dataclasses.field(default_factory=Counter)
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)
    #: By alias: why a backend could not be read, or not to its end.
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
    ordered, start = best.in_order(), (page - 1) * PAGE_ROWS
    before = Counter((name, alias) for name, alias, record in ordered[:start] if record is None)
    records = _complete(found, ordered[start:][:PAGE_ROWS], before)
    now = clock_of(records)
    found.rows = [_row(record, alias, now) for record, alias in records]
    return found


class _Best:
    """Keeps the first ``keep`` holds in the asked order, of all that are added.

    If many are added, most of them come after those that are kept, and cost one comparison. Unknown values come last.
    """

    def __init__(self, order: str, keep: int) -> None:
        self._descending = order.startswith("-")
        self._keep = keep
        self._known: list[tuple[Any, str, str, Record | None]] = []
        self._unknown: list[tuple[str, str, Record | None]] = []
        self._limit: Any = None

    def add(self, rows: Iterable[Scanned], alias: str) -> None:
        limit, descending, known = self._limit, self._descending, self._known
        for name, value, _, record in rows:
            if value is None:
                self._unknown.append((name, alias, record))
            elif limit is None or (value >= limit if descending else value <= limit):
                known.append((value, name, alias, record))
        if len(known) >= 2 * self._keep + 1000:
            self._cut()
            self._limit = known[-1][0]

    def _cut(self) -> None:
        self._known.sort(key=itemgetter(0, 1, 2), reverse=self._descending)
        del self._known[self._keep :]

    def in_order(self) -> list[tuple[str, str, Record | None]]:
        """Name, alias, and the record if it is there."""
        self._cut()
        unknown = sorted(self._unknown, key=itemgetter(0, 1)) if len(self._known) < self._keep else []
        return [*((name, alias, record) for _, name, alias, record in self._known), *unknown]


def _complete(
    found: Listing, chosen: Sequence[tuple[str, str, Record | None]], before: Counter[tuple[str, str]]
) -> list[tuple[Record, str]]:
    """The records of the page; reads those that are missing, and leaves out holds that have ended meanwhile.

    Of a name that several hold, the oldest come first; as many of them as ``before`` says are on earlier pages.
    """
    missing: dict[str, dict[str, None]] = defaultdict(dict)
    for name, alias, record in chosen:
        if record is None:
            missing[alias][name] = None
    read: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for alias, names in missing.items():
        try:
            there = lock_backends.operations(alias).inspect_many(list(names), clock.now() + BACKEND_SECONDS)
        except Exception as error:
            found.errors[alias] = explain(error, alias)
        else:
            for record in sorted(there, key=lambda each: each.fencing_token or 0, reverse=True):
                read[record.name, alias].append(record)
    for at, count in before.items():
        if at in read:
            del read[at][len(read[at]) - count :]
    complete = []
    for name, alias, known in chosen:
        if known is not None:
            complete.append((known, alias))
        elif read[name, alias]:
            complete.append((read[name, alias].pop(), alias))
    return complete


def kind_of(name: str) -> str:
    """The namespace of a lock's name, as it is spelled there; empty if it is no lock's name."""
    if name.startswith(SCOPED):
        name = PREFIX + name.partition(":")[2]
    end = name.find(":", len(PREFIX))
    return name[len(PREFIX) : end] if end > 0 and name.startswith(PREFIX) else ""


def _read(found: Listing, best: _Best) -> None:
    """Add matching holds to ``best``, and counts and errors to ``found``."""
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
    kind_wanted, matches = found.query.kind, searcher(found.query.search)
    limit = min(BACKEND_SECONDS, max(0.1, end - clock.now()))
    read = matching = 0
    try:
        for rows in _scan(alias, found.query.order.removeprefix("-"), matches is not None, limit):
            if read and clock.now() > end:
                found.unfinished.append(alias)
                break
            read += len(rows)
            found.kinds.update([kind_of(row[0]) for row in rows])
            wanted = rows
            if kind_wanted:
                wanted = [row for row in wanted if kind_of(row[0]) == kind_wanted]
            if matches is not None:
                wanted = [row for row in wanted if matches(row[0], row[2])]
            matching += len(wanted)
            best.add(wanted, alias)
    finally:
        found.read += read
        found.backends[alias] += read
        found.matching += matching


def _scan(alias: str, order: str, searched: bool, seconds: float) -> Iterator[list[Scanned]]:
    """All holds of a backend, many at a time; only the fields that are needed, if the backend can scan."""
    operations, deadline = about_to_ask(alias, seconds)
    field = ORDERS[order]
    fields = [field] if field else []
    if searched and field != "holder":
        fields.append("holder")
    light = operations.scan_held(fields, deadline)
    if light is None:
        for records in _batched(operations.list_held(deadline), LOOK_EVERY):
            yield [
                (each.name, getattr(each, field) if field else _value(each.name, alias, order), each.holder, each)
                for each in records
            ]
        return
    for rows in light:
        if searched:
            yield [(row[0], row[1] if field else _value(row[0], alias, order), row[-1], None) for row in rows]
        else:
            yield [(row[0], row[1] if field else _value(row[0], alias, order), None, None) for row in rows]


def _value(name: str, alias: str, order: str) -> str:
    return alias if order == "backend" else name


def _batched(records: Iterator[Record], count: int) -> Iterator[list[Record]]:
    while batch := list(itertools.islice(records, count)):
        yield batch


def explain(error: Exception, alias: str) -> str:
    """What to show of a backend's error. Hide the text of a third party's error: it may contain a password."""
    if isinstance(error, (LockError, ImproperlyConfigured)):
        return str(error)
    logger.error("The lock backend %r failed", alias, exc_info=error)
    return f"{type(error).__name__}; the log says more"


def clock_of(records: Sequence[tuple[Record, str]]) -> dict[str, float]:
    """The time at each backend, computed from a lease; the page's own clock may be wrong."""
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
        place=record.place,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One hold that a user selected: its fencing token distinguishes it from the key's next hold."""

    backend: str
    name: str
    fencing_token: int | None

    def encoded(self) -> str:
        return json.dumps([self.backend, self.fencing_token, self.name])

    @classmethod
    def decoded(cls, text: str) -> Target | None:
        """The target; None for a text that the page did not write."""
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

    def operations(self) -> BaseLockBackend:
        return lock_backends.operations(self.backend)


class Inspector:
    """Looks up targets one by one. Does not ask a backend again that failed once."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def row(self, target: Target) -> Row | None:
        """The hold that the key has now, maybe another one; None without one, or if the backend is in ``errors``."""
        if target.backend in self.errors:
            return None
        try:
            there = target.operations().inspect_many([target.name], clock.now() + BACKEND_SECONDS)
        except Exception as error:
            self.errors[target.backend] = explain(error, target.backend)
            return None
        if not there:
            return None
        same = [record for record in there if record.fencing_token == target.fencing_token]
        item = ((same or there)[0], target.backend)
        return _row(*item, clock_of([item]))
