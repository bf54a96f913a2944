"""Shared and placed holds on the session of this process.

The session would be granted each of its own locks again. So the process's table decides first, for the one thread that
has the session: which places are taken here, and whether the exclusive hold is here. On the server a hold is a lock of
its own, by which it is listed and published, and the key of the lock in share mode, which keeps exclusive holds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ... import clock
from ...errors import LockBackendError
from ..base import SHARED, WANTED_SECONDS, Record, places_of
from ..postgres.errors import NoAnswer, driver_errors, explain
from ..postgres.session import Session
from ..postgres.statements import Parameter, Row, Statement
from . import sql
from .sql import Entry, advisory_key

if TYPE_CHECKING:
    from .session import HoldSession

#: Holds in the first so many places are told of before they are published.
KNOWN_PLACES = 32


def place_key(name: str, place: int) -> int:
    """The advisory lock that is one place of ``name``."""
    return advisory_key(name, f"place {place}")


def word_key(name: str) -> int:
    """The row that is an exclusive waiter's word."""
    return advisory_key(name, "word")


def join(holds: HoldSession, session: Session, entry: Entry, deadline: float) -> Row | None:
    """Ask for a shared or placed hold; None if this process knows that it cannot be had."""
    alone = holds.entries.get(entry.gate)
    if alone is not None and alone.alive and (alone.granted or alone.session is not None):
        _answered(alone)
        return None
    taken, places = {each.place for each in holds.members_of(entry.gate)}, places_of(entry.owner)
    free = [None] if places == SHARED else [place for place in range(places) if place not in taken]
    if not free:
        return None
    keys = [entry.key if place is None else place_key(entry.name, place) for place in free]
    entry.session = session
    holds.gates.setdefault(entry.gate, False)
    try:
        text = "{" + ",".join(map(str, keys)) + "}"
        [row] = session.execute(sql.JOIN, [entry.gate, text, word_key(entry.name)], deadline, entry.owner)
    except driver_errors() as error:
        try:  # the locks of a statement that fails stay
            take_back(holds, session, entry, deadline)
        except NoAnswer:
            raise NoAnswer(sent=True) from error
        explain(error, holds.alias)
    sql.check_answer(session, row)
    if row[2] is not None:
        at = int(row[3] or 0) - 1
        entry.place = free[at]
        holds.rename(entry, keys[at])
    return row


def _answered(entry: Entry) -> None:
    """LockBackendError if it is not known yet whether ``entry`` was granted."""
    if not entry.granted:
        raise LockBackendError(f"An earlier try for {entry.name} was not answered yet", name=entry.name)


def take_back(holds: HoldSession, session: Session, entry: Entry, deadline: float) -> None:
    """Free whatever was granted to a try for a shared or placed hold whose answer is not known."""
    holds.doubtful = True
    holds.gates[entry.gate] = True
    holds.forget(entry)
    holds.sweep(session, deadline)


def in_the_way(holds: HoldSession, gate: int) -> bool:
    """Whether this process has shared or placed holds of the key, which the server would not see as in the way."""
    members = [each for each in holds.members_of(gate) if each.alive]
    for each in members:
        _answered(each)
    return bool(members)


def ways_out(entry: Entry) -> list[tuple[Statement, list[Parameter]]]:
    """How a hold is freed, of any kind: the first that the server does not refuse."""
    marker = sql.marker_key(entry.name)
    ways: list[tuple[Statement, list[Parameter]]]
    if entry.gate:
        published, ways = sql.LEAVE_PUBLISHED, [(sql.LEAVE, [entry.key, marker, entry.gate])]
        ways.append((sql.LEAVE_QUIETLY, [entry.key, entry.gate]))
    else:
        published, ways = sql.RELEASE_PUBLISHED, [(sql.RELEASE, [entry.key, marker]), (sql.UNLOCK, [entry.key])]
    return [(published, ways[0][1]), *ways] if entry.published else ways


def open_gates(holds: HoldSession, session: Session, deadline: float, but: Entry | None = None) -> None:
    """Give back the keys in share mode for which there is no shared or placed hold any more, ``but`` one that ends."""
    for gate in list(holds.gates):
        if not any(entry.gate == gate and entry is not but for entry in list(holds.entries.values())):
            while session.execute(sql.SHARES, [*sql.halves(gate)], deadline):
                session.execute(sql.UNLOCK_SHARED, [gate], deadline)
            holds.gates.pop(gate, None)


def leave_word(holds: HoldSession, name: str, gate: int, deadline: float) -> bool:
    """Let new shared and placed holds stand behind an exclusive waiter; whether there are any that it waits for."""
    seconds = min(WANTED_SECONDS, deadline - clock.now())
    if seconds <= 0:
        return False
    try:
        interval = f"{seconds:.3f} s"
        return bool(holds.rows(sql.WANT, word_key(name), interval, *sql.halves(gate), deadline=deadline))
    except LockBackendError:
        return False  # it is for fairness


def found(holds: HoldSession, name: str, deadline: float) -> list[tuple[int, int, Record]]:
    """Key, server process and record of all holds of ``name``, also of an exclusive one, by one request."""
    return [(int(row[0] or 0), int(row[1] or 0), _record(holds, row, name)) for row in _rows(holds, name, deadline)]


def _rows(holds: HoldSession, name: str, deadline: float) -> Iterator[Row]:
    gate = advisory_key(name)
    keys = "{" + ",".join(map(str, [gate, *(place_key(name, place) for place in range(KNOWN_PLACES))])) + "}"
    rows = holds.rows(sql.INSPECT_HOLDS, name, keys, *sql.halves(gate), deadline=deadline)
    known = [row for row in rows if row[6] == b"ExclusiveLock"]
    mine = {entry.key for entry in holds.members_of(gate)}
    own = holds.pool.slots[0].session
    if own is not None:  # those of this process that are not published yet
        seen = {int(row[0] or 0) for row in known}
        pid = str(own.server_pid).encode()
        known += [(str(key).encode(), pid, None, None, None, None, b"") for key in mine - seen]
    yield from known
    told = {row[1] for row in known}
    yield from (row for row in rows if row[6] == b"ShareLock" and row[1] not in told)


def _record(holds: HoldSession, row: Row, name: str) -> Record:
    entry = holds.entries.get(int(row[0] or 0))
    own = holds.pool.slots[0].session
    if entry is not None and entry.granted and own is not None and int(row[1] or 0) == own.server_pid:
        return entry.record()
    return sql.record(row, name)
