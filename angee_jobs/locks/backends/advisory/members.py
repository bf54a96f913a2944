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
from ..base import SHARED, WANTED_SECONDS, Grant, Record, places_of
from ..postgres.errors import driver_errors, explain
from ..postgres.session import Session
from ..postgres.statements import Parameter, Row, Statement
from . import sql
from .sql import Asking, Entry, advisory_key

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


def join(holds: HoldSession, name: str, owner: str, holder: str, deadline: float) -> Grant | None:
    """``acquire()`` for a shared or placed hold."""
    asking, places = Asking(), places_of(owner)
    entry = Entry(name, advisory_key(owner, "member"), owner, holder, asking)
    entry.gate = advisory_key(name)
    if not holds.register(entry, deadline):
        return None

    def work(session: Session) -> Row | None:
        alone = holds.entries.get(entry.gate)
        if _unanswered(alone):
            raise LockBackendError(f"An earlier try for {name} was not answered yet", name=name)
        if alone is not None and alone.granted and alone.alive:
            return None
        taken = {each.place for each in holds.members_of(entry.gate)}
        free = [None] if places == SHARED else [place for place in range(places) if place not in taken]
        if not free:
            return None
        keys = [entry.key if place is None else place_key(name, place) for place in free]
        entry.session = session
        try:
            text = "{" + ",".join(map(str, keys)) + "}"
            [row] = session.execute(sql.JOIN, [entry.gate, text, word_key(name)], deadline, owner)
        except driver_errors() as error:
            holds.doubtful = True
            explain(error, holds.alias)
        if row[2] == b"-1":
            raise LockBackendError(f"The database {holds.alias!r} is read-only here, and fencing tokens need writing")
        if not session.direct and int(row[0] or 0) != session.server_pid:
            raise sql.pooling_error(holds.alias)
        if row[2] is None:
            return None
        at = int(row[3] or 0) - 1
        entry.place = free[at]
        holds.rename(entry, keys[at])
        return row

    try:
        row = holds.run(deadline, work)
    except LockBackendError as error:
        if not error.uncertain:
            holds.forget(entry)
        raise
    if row is None:
        holds.forget(entry)
        return None
    return entry.grant(row)


def _unanswered(entry: Entry | None) -> bool:
    return entry is not None and not entry.granted and entry.session is not None and entry.alive


def in_the_way(holds: HoldSession, gate: int, name: str) -> bool:
    """Whether this process has shared or placed holds of the key, which the server would not see as in the way."""
    members = [each for each in holds.members_of(gate) if each.alive]
    if any(_unanswered(each) for each in members):
        raise LockBackendError(f"An earlier try for {name} was not answered yet", name=name)
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
    """Key, server process and record of all shared and placed holds of ``name``."""
    return [(int(row[0] or 0), int(row[1] or 0), _record(holds, row, name)) for row in _rows(holds, name, deadline)]


def _rows(holds: HoldSession, name: str, deadline: float) -> Iterator[Row]:
    keys = "{" + ",".join(str(place_key(name, place)) for place in range(KNOWN_PLACES)) + "}"
    rows = holds.rows(sql.INSPECT_MEMBERS, name, keys, *sql.halves(advisory_key(name)), deadline=deadline)
    known = [row for row in rows if row[6] == b"ExclusiveLock"]
    mine = {entry.key for entry in holds.members_of(advisory_key(name))}
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
