"""Rows of the lock table on PostgreSQL, as the policy wants them, and the reverse."""

from __future__ import annotations

from collections.abc import Collection

from ..base import SHARED, Grant, Record, finite
from ..postgres.statements import Row, number
from . import postgres_places as members


def array(values: Collection[str | float]) -> str:
    """PostgreSQL's text form of an array of digests, hashes or numbers, which need no quoting."""
    return "{" + ",".join(map(str, values)) + "}"


def grant(rows: list[Row]) -> Grant | None:
    if not rows:
        return None
    token, acquired_at, expires_at = rows[0][:3]
    assert token is not None
    place = int(rows[0][3] or 0) if len(rows[0]) > 3 else members.FIRST_SHARED
    return Grant(int(token), number(acquired_at), number(expires_at), place if place < members.FIRST_SHARED else None)


def among(places: int) -> int | None:
    """The number of places as statements take it: none for a shared hold."""
    return None if places == SHARED else places


def record(row: Row) -> Record:
    name, holder, acquired_at, expires_at, expires_in, token = row[:6]
    return Record(
        name=(name or b"").decode(),
        holder=(holder or b"").decode(),
        acquired_at=finite(number(acquired_at)),
        expires_at=finite(number(expires_at)),
        expires_in=finite(number(expires_in)),
        fencing_token=int(token or 0),
        place=place(row[6]) if len(row) > 6 else None,
    )


def text(value: bytes | None) -> str:
    return (value or b"").decode()


def place(value: bytes | None) -> int | None:
    return None if value is None else int(value)


#: How the fields of a scan are read that are no mere numbers.
READERS = {"holder": text, "place": place}


def count(rows: list[Row]) -> int:
    return int(rows[0][0] or 0)
