"""What can be asked of the page of held locks: search, filters, order and page, and which locks match a search."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from ..locks.holder import parse_holder
from ..locks.keys import LockKey

#: What the page offers to reload itself after, in seconds; 0: not at all.
REFRESH = (0, 5, 15, 60)

#: By what the rows can be sorted: a field of their records, or what ``heldlocks.py`` says. None comes last either way.
ORDERS: Mapping[str, str] = {
    "key": "",
    "holder": "holder",
    "since": "acquired_at",
    "expires": "expires_in",
    "token": "fencing_token",
    "backend": "",
}
#: Words that stand in the stored form of a holder as they were typed.
_PLAIN = re.compile(r"[\w.@/+-]+", re.ASCII)
#: Of these, the ones that may also be a number there, or the name of a field or a part of one.
_NUMBER, _FIELDS = re.compile(r"[-+.\de]+"), "host pid thread ttl task note"


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


def searcher(text: str) -> Callable[[str, str | None], bool] | None:
    """Whether every word of ``text`` is in a key or its holder, in any case; None: there are no words."""
    words = text.casefold().split()
    if not words:
        return None
    plain = [word for word in words if _PLAIN.fullmatch(word)]
    bare = [word.strip("[]") for word in words]  # which stand around the task and the note
    # Then the stored form says enough, which spares reading the holder.
    sure = len(plain) == len(words) and not any(word in _FIELDS or _NUMBER.fullmatch(word) for word in words)

    def matches(name: str, holder: str | None) -> bool:
        stored = f"{name}\n{holder or ''}".casefold()
        escaped = "\\" in stored or "%" in name
        for word in plain if escaped else bare:
            if word not in stored:
                return False  # the usual case among many
        if sure and not escaped:
            return True
        shown = f"{name}\n{parse_holder(holder) or ''}"
        if "%" in name:
            shown += "\n" + " ".join(pieces(name))
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
