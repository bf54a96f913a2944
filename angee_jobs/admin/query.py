"""What a user can ask the page of held locks for: search, filters, order, page. Decides which locks match a search."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from ..locks.holder import parse_holder
from ..locks.keys import LockKey
from ..locks.types import printable

#: How often the page can reload itself, in seconds; 0: never.
REFRESH = (0, 5, 15, 60)

#: What the rows can be sorted by, and the field of their records; empty: ``listing.py`` computes the value. None always
#: comes last.
ORDERS: Mapping[str, str] = {
    "key": "",
    "holder": "holder",
    "since": "acquired_at",
    "expires": "expires_in",
    "token": "fencing_token",
    "backend": "",
}
#: Words that the stored form of a holder contains exactly as they were typed.
_PLAIN = re.compile(r"[\w.@/+-]+", re.ASCII)
#: Of these, words that the stored form may also contain as a number, or in the name of a field.
_NUMBER, _FIELDS = re.compile(r"[-+.\de]+"), "host pid thread ttl task note"


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """What the user asked for. A parameter that makes no sense (in an old bookmark, say) counts as its default."""

    search: str = ""
    backend: str = ""
    kind: str = ""
    order: str = "since"  # the oldest first: they are what operators look for
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
        """The query string of a link. Any change but that of the page or the refresh leads to the first page."""
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
        """The hidden fields of a form that changes the fields ``but``."""
        usual = Query()
        return {
            name: getattr(self, field)
            for field, name in self._NAMES.items()
            if field not in but and getattr(self, field) != getattr(usual, field)
        }


def searcher(text: str) -> Callable[[str, str | None], bool] | None:
    """Whether every word of ``text`` is in a key or its holder, in any case; None: there are no words."""
    words = text.casefold().split()
    if not words:
        return None
    plain = [word for word in words if _PLAIN.fullmatch(word)]
    bare = [word.strip("[]") for word in words]  # the page shows the task and the note in brackets
    # If so, the stored form decides, and the holder need not be parsed.
    sure = len(plain) == len(words) and not any(word in _FIELDS or _NUMBER.fullmatch(word) for word in words)

    def matches(name: str, holder: str | None) -> bool:
        stored = f"{name}\n{holder or ''}".casefold()
        escaped = "\\" in stored or "%" in name
        for word in plain if escaped else bare:
            if word not in stored:
                return False  # the usual case
        if sure and not escaped:
            return True
        shown = f"{name}\n{parse_holder(holder) or ''}"
        if "%" in name:
            raw = " ".join(pieces(name))
            shown += f"\n{raw}\n{printable(raw)}"
        shown = shown.casefold()
        return all(word in shown for word in words)

    return matches


def pieces(name: str) -> list[str]:
    """The namespace and the parts of a lock's name; the text itself if it is not a lock's name."""
    key = parse_key(name)
    return [name] if key is None else [key.namespace, *key.parts]


def parse_key(name: str) -> LockKey | None:
    try:
        return LockKey.parse(name)
    except ValueError:
        return None
