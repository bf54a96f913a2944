"""Statements for PostgreSQL, their parameters, and their answers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ... import clock

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

#: A row of an answer: PostgreSQL's text form of each value.
Row = tuple[bytes | None, ...]
Parameter = str | int | float | None

#: A result's status in libpq; integers here, so that this module can be imported without the driver.
FATAL_ERROR, PIPELINE_SYNC = 7, 10
_PLACEHOLDER = re.compile(rb"\$(\d+)")


class Statement:
    """One SQL statement, with ``$1`` and so on for its parameters.

    With ``after``, that statement goes in front of it in the same request and transaction. The later one sees what was
    committed before it began itself, and so also what the first one has waited for. Each is sent the parameters that it
    names. Signal handlers that share a session must not use such a statement.
    """

    __slots__ = ("after", "name", "picks", "sql")
    _numbers = itertools.count(1)  # one step is atomic: two statements of one name would be taken for each other

    def __init__(self, sql: str, *, after: str = "") -> None:
        self.sql = " ".join(sql.split()).encode()
        self.name = b"angee_%d" % next(Statement._numbers)
        self.after: Statement | None = None
        #: Which of the parameters it is sent, where it has not all of them.
        self.picks: list[int] = []
        if after:
            self.after = Statement(after)
            for each in (self.after, self):
                each._pick()

    def _pick(self) -> None:
        """Number the parameters anew, without gaps: a server would not know the type of one that is not named."""
        numbers = sorted({int(number) for number in _PLACEHOLDER.findall(self.sql)})
        self.picks = [number - 1 for number in numbers]
        self.sql = _PLACEHOLDER.sub(lambda match: b"$%d" % (numbers.index(int(match[1])) + 1), self.sql)

    def picked(self, values: list[bytes | None]) -> list[bytes | None]:
        return [values[at] for at in self.picks] if self.picks else values


class Request:
    """One statement under way. ``owner``: the hold that it is about, if any."""

    __slots__ = ("done", "owner", "results", "since")

    def __init__(self, owner: str = "") -> None:
        self.owner = owner
        self.since = clock.now()
        self.done = False
        self.results: list[PGresult] = []


def literally(pgconn: PGconn, sql: bytes, values: Sequence[bytes | None]) -> bytes:
    """The statement with its parameters written into it, for poolers that know no more than the simple protocol."""
    from psycopg import pq

    escaping = pq.Escaping(pgconn)
    literals = [b"NULL" if value is None else bytes(escaping.escape_literal(value)) for value in values]
    return _PLACEHOLDER.sub(lambda match: literals[int(match[1]) - 1], sql)


def rows_of(results: list[PGresult]) -> list[Row]:
    """The rows of the one result that has any; the others are of settings in front of the statement.

    Not "the last": a signal handler that read along may have left them out of order.
    """
    rows: list[Row] = []
    for result in results:
        if result.status == FATAL_ERROR:
            from psycopg.errors import error_from_result

            raise error_from_result(result)
        columns = range(result.nfields)
        if not columns:
            continue
        rows += [tuple([result.get_value(at, column) for column in columns]) for at in range(result.ntuples)]
    return rows


def message_of(pgconn: PGconn, results: Sequence[PGresult] = ()) -> str:
    for result in results:
        if result.status == FATAL_ERROR:
            return result.get_error_message()
    return pgconn.get_error_message().strip() or "the connection was lost"


def number(value: bytes | None) -> float | None:
    """A number in PostgreSQL's text form."""
    return None if value is None else float(value)


def milliseconds(seconds: float) -> str:
    """A duration in the form that PostgreSQL's settings take: never 0, which would mean no limit."""
    return str(max(1, math.floor(seconds * 1000)))
