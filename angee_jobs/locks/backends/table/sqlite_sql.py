"""What the lock table on SQLite says to its file: the schema, the clock, the statements."""

from __future__ import annotations

import functools
import operator
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

from ... import clock

Parameters = tuple[Any, ...]

#: Says in the file's header that it is ours, and that its tables are those below.
APPLICATION_ID = 0x616E6765  # "ange"
VERSION = 2

HAS_CLOCK = hasattr(time, "CLOCK_BOOTTIME")


def machine_clock() -> Callable[[], float]:
    """The seconds since the machine's boot, for all processes on it; the wall clock where the system counts none.

    A container may have a time namespace, in which CLOCK_BOOTTIME is shifted by what stands in /proc. A process that
    cannot read that is taken to be in none.
    """
    if not HAS_CLOCK:
        return time.time
    shift = 0.0
    try:
        with open("/proc/self/timens_offsets") as offsets:
            for line in offsets:
                name, seconds, nanoseconds = line.split()
                if name in ("boottime", "7"):
                    shift = int(seconds) + int(nanoseconds) / 1e9
    except (OSError, ValueError):
        pass
    return clock.now if shift == 0.0 else lambda: clock.now() - shift


now = machine_clock()
#: The machine's too, and what a test makes of time.time() is not.
wall = functools.partial(time.clock_gettime, time.CLOCK_REALTIME) if hasattr(time, "clock_gettime") else time.time


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


#: The highest token of the removed rows is kept as the floor of new ones, also of those that were deleted by hand.
SCHEMA = (
    """
    CREATE TABLE lock (
        name TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        holder TEXT NOT NULL,
        acquired_at REAL NOT NULL,
        renewed REAL NOT NULL,
        expires REAL NOT NULL,
        fencing_token INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE TABLE floor (fencing_token INTEGER NOT NULL)",
    "INSERT INTO floor VALUES (0)",
    """
    CREATE TRIGGER removed AFTER DELETE ON lock
    WHEN typeof(old.fencing_token) = 'integer' AND old.fencing_token < 9000000000000000000
    BEGIN
        UPDATE floor SET fencing_token = max(fencing_token, old.fencing_token);
    END
    """,
    "CREATE TABLE boot (id TEXT NOT NULL)",
    "INSERT INTO boot VALUES ('')",
    f"PRAGMA user_version = {VERSION}",
    f"PRAGMA application_id = {APPLICATION_ID}",
)

#: Shared and placed holds. While they live, the row of their key in `lock` has no owner, and ends with the last of
#: them: so an exclusive hold is refused by that row alone, and costs what it costs without them. The triggers see
#: to that row, since a request is one statement. They look for the last hold only where it may have changed: a renewal
#: of 1000 holds of one key kept the file for half a second.
MEMBERS = (
    """
    CREATE TABLE IF NOT EXISTS member (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        owner TEXT NOT NULL,
        place INTEGER,
        holder TEXT NOT NULL,
        acquired_at REAL NOT NULL,
        renewed REAL NOT NULL,
        expires REAL NOT NULL,
        fencing_token INTEGER NOT NULL,
        UNIQUE (name, owner)
    )
    """,
    """
    CREATE TRIGGER IF NOT EXISTS joined AFTER INSERT ON member BEGIN
        DELETE FROM member WHERE name = new.name AND expires <= new.renewed;
        INSERT INTO lock VALUES (
            new.name, '', '', new.acquired_at, new.renewed, new.expires, new.fencing_token
        )
        ON CONFLICT (name) DO UPDATE SET
            owner = '', holder = '', acquired_at = excluded.acquired_at, renewed = excluded.renewed,
            expires = max(lock.expires, excluded.expires), fencing_token = excluded.fencing_token;
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS stayed AFTER UPDATE OF expires ON member BEGIN
        UPDATE lock SET
            renewed = max(renewed, new.renewed),
            expires = iif(
                new.expires >= old.expires,
                max(expires, new.expires),
                (SELECT max(expires) FROM member WHERE name = new.name)
            )
        WHERE name = new.name AND owner = '';
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS left AFTER DELETE ON member BEGIN
        UPDATE lock SET expires = coalesce((SELECT max(expires) FROM member WHERE name = old.name), old.renewed)
        WHERE name = old.name AND owner = '' AND expires <= old.expires;
    END
    """,
    # An exclusive waiter's word. It holds while the key's last token is what it was: no member gets in meanwhile, so
    # that the next token is that of an exclusive hold.
    """
    CREATE TABLE IF NOT EXISTS wanted (
        name TEXT PRIMARY KEY, until REAL NOT NULL, fencing_token INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TRIGGER IF NOT EXISTS asked AFTER INSERT ON wanted BEGIN
        DELETE FROM wanted WHERE until < new.until - 10;
    END
    """,
)


def begin_boot(connection: sqlite3.Connection) -> None:
    """End what an earlier boot of the machine left, in the transaction that opens the file.

    That was renewed at a time which is yet to come. The boot's id only says that a look is due: containers may each see
    another one, or none.
    """
    boot = _boot()
    if HAS_CLOCK and (not boot or boot != connection.execute("SELECT id FROM boot").fetchone()[0]):
        for table in ("member", "lock"):
            Statement(f"UPDATE {table} SET renewed = ?1, expires = ?1 WHERE renewed > ?1")(connection, ())
        connection.execute("DELETE FROM wanted WHERE until > ? + 10", [now()])
        if boot:
            connection.execute("UPDATE boot SET id = ?", [boot])


class Statement:
    """SQL with numbered parameters; ?1 is in each the time, by the machine's clock.

    SQLite is given plain ones, since Python 3.12.0 to 3.12.3 take a number for a name, and warn at every call.
    """

    def __init__(self, numbered: str) -> None:
        self.sql = re.sub(r"\?\d+", "?", numbered)
        self._pick = operator.itemgetter(*(int(number) - 1 for number in re.findall(r"\?(\d+)", numbered)))

    def __call__(self, connection: sqlite3.Connection, parameters: Parameters) -> list[Any]:
        """The rows. To the last one: what is half read keeps the file locked against everybody."""
        return connection.execute(self.sql, self._pick((now(), *parameters))).fetchall()


class Change(Statement):
    """A statement that returns no rows."""

    def count(self, connection: sqlite3.Connection, parameters: Parameters) -> int:
        """How many rows it changed."""
        return connection.execute(self.sql, self._pick((now(), *parameters))).rowcount


class Acquire(Statement):
    """?2 is the time by the wall clock, as it is when the file is known to be in place: tokens begin there."""

    def __call__(self, connection: sqlite3.Connection, parameters: Parameters) -> list[Any]:
        return connection.execute(self.sql, self._pick((now(), wall(), *parameters))).fetchall()


ACQUIRE = Acquire("""
INSERT INTO lock VALUES (
    ?3, ?4, ?5, ?2, ?1, ?1 + ?6,
    max(CAST(?2 * 1000000 AS INTEGER), coalesce((SELECT fencing_token FROM floor), 0) + 1)
)
ON CONFLICT (name) DO UPDATE SET
    owner = excluded.owner, holder = excluded.holder, acquired_at = excluded.acquired_at, renewed = excluded.renewed,
    expires = excluded.expires, fencing_token = max(excluded.fencing_token, lock.fencing_token + 1)
WHERE lock.expires <= ?1
RETURNING fencing_token, acquired_at
""")
#: The lowest free place is 0, or the one after a place that is taken.
JOIN = Acquire("""
WITH live AS (SELECT place FROM member WHERE name = ?3 AND expires > ?1 AND place IS NOT NULL)
INSERT INTO member (name, owner, place, holder, acquired_at, renewed, expires, fencing_token)
SELECT
    ?3, ?4, free.place, ?5, ?2, ?1, ?1 + ?6,
    max(
        CAST(?2 * 1000000 AS INTEGER),
        coalesce((SELECT fencing_token FROM floor), 0) + 1,
        coalesce((SELECT fencing_token FROM lock WHERE name = ?3), 0) + 1
    )
FROM (
    SELECT min(place) AS place FROM (SELECT 0 AS place UNION ALL SELECT place + 1 FROM live)
    WHERE place < ?7 AND place NOT IN (SELECT place FROM live)
) AS free
WHERE (free.place IS NOT NULL OR ?7 < 0)
AND NOT EXISTS (SELECT 1 FROM lock WHERE name = ?3 AND expires > ?1 AND owner <> '')
AND NOT EXISTS (SELECT 1 FROM wanted JOIN lock USING (name, fencing_token) WHERE name = ?3 AND until > ?1)
ON CONFLICT (name, owner) DO NOTHING
RETURNING fencing_token, acquired_at, place
""")
_EXTEND = """
UPDATE {table} SET renewed = max(renewed, ?1), expires = max(expires, ?1 + batch.ttl)
FROM (
    SELECT json_extract(value, '$[0]') AS name, json_extract(value, '$[1]') AS owner, json_extract(value, '$[2]') AS ttl
    FROM json_each(?2)
) AS batch
WHERE {table}.name = batch.name AND {table}.owner = batch.owner AND {table}.expires > ?1
{more}
RETURNING owner
"""
EXTEND = Statement(_EXTEND.format(table="lock", more=""))
#: Without the key's row, somebody has emptied the table.
EXTEND_MEMBERS = Statement(
    _EXTEND.format(
        table="member",
        more="AND EXISTS (SELECT 1 FROM lock WHERE lock.name = member.name AND lock.owner = '' AND lock.expires > ?1)",
    )
)
FREE = "owner = '', holder = '', expires = ?1"
RELEASE = Change(f"UPDATE lock SET {FREE} WHERE name = ?2 AND owner = ?3 AND expires > ?1")
LEAVE = Change("DELETE FROM member WHERE name = ?2 AND owner = ?3 AND expires > ?1")
#: Of the very hold that was read before.
FORCE_RELEASE = Change(f"UPDATE lock SET {FREE} WHERE name = ?2 AND fencing_token IS ?3 AND expires > ?1")
ADOPT = Statement("""
UPDATE lock SET owner = ?4, holder = ?5, renewed = ?1, expires = ?1 + ?6
WHERE name = ?2 AND owner = ?3 AND expires > ?1
RETURNING fencing_token, acquired_at
""")
ADOPT_MEMBER = Statement("""
UPDATE member SET owner = ?4, holder = ?5, renewed = ?1, expires = ?1 + ?6
WHERE name = ?2 AND owner = ?3 AND expires > ?1
RETURNING fencing_token, acquired_at, place
""")
FORCE_LEAVE = Statement("""
DELETE FROM member WHERE name = ?2 AND expires > ?1 AND (?3 IS NULL OR fencing_token = ?3)
RETURNING name, holder, acquired_at, expires - ?1, fencing_token, place
""")
_RECORD = "name, holder, acquired_at, expires - ?1, fencing_token"
RECORD = f"SELECT {_RECORD}, NULL FROM lock"
MEMBER = f"SELECT {_RECORD}, place, id FROM member"
INSPECT = Statement(f"{RECORD} WHERE name = ?2 AND owner <> '' AND expires > ?1")
_AMONG = "name IN (SELECT value FROM json_each(?2)) AND expires > ?1"
INSPECT_MANY = Statement(
    f"{RECORD} WHERE {_AMONG} AND owner <> '' UNION ALL SELECT {_RECORD}, place FROM member WHERE {_AMONG}"
)
HELD = Statement(f"{RECORD} WHERE name > ?2 AND owner <> '' AND expires > ?1 ORDER BY name LIMIT ?3")
HELD_MEMBERS = Statement(f"{MEMBER} WHERE id > ?2 AND expires > ?1 ORDER BY id LIMIT ?3")
#: Where a stretch of so many rows ends. A scan takes one after the other, live or not, so that none lasts long.
STRETCH = Statement("SELECT name FROM lock WHERE name > ?2 ORDER BY name LIMIT 1 OFFSET ?3")
_COLUMNS = {"expires_in": "expires - ?1", "place": "NULL"}
EXPIRED = "owner <> '' AND expires <= ?1 - ?2"
LIST_EXPIRED = Statement(f"{RECORD} WHERE {EXPIRED} AND name > ?3 ORDER BY name LIMIT ?4")
EXPIRED_MEMBERS = Statement(f"{MEMBER} WHERE expires <= ?1 - ?2 AND id > ?3 ORDER BY id LIMIT ?4")
REMOVE_MEMBERS = Statement("""
DELETE FROM member WHERE id IN (SELECT id FROM member WHERE expires <= ?1 - ?2 LIMIT ?3) RETURNING name
""")
REMAINING = Statement("SELECT expires - ?1, owner FROM lock WHERE name = ?2 AND expires > ?1")
#: What keeps a shared or placed hold out: an exclusive one, an exclusive waiter's word, or that no place is free.
REMAINING_MEMBERS = Statement("""
SELECT min(until) - ?1 FROM (
    SELECT expires AS until FROM lock WHERE name = ?2 AND owner <> '' AND expires > ?1
    UNION ALL
    SELECT until FROM wanted JOIN lock USING (name, fencing_token) WHERE name = ?2 AND until > ?1
    UNION ALL
    SELECT min(expires) FROM member WHERE name = ?2 AND expires > ?1 AND place < ?3 HAVING count(*) >= ?3 AND ?3 > 0
)
""")
#: A waiter that soon gives up does not shorten the word of another one.
WANT = Change("""
INSERT INTO wanted
SELECT name, ?1 + ?3, fencing_token FROM lock WHERE name = ?2 AND owner = '' AND expires > ?1
ON CONFLICT (name) DO UPDATE SET
    until = iif(fencing_token = excluded.fencing_token, max(until, excluded.until), excluded.until),
    fencing_token = excluded.fencing_token
""")
IDLE = "owner = '' AND expires <= ?1 - ?2"
REMOVE_EXPIRED, REMOVE_IDLE = (
    Statement(f"""
    DELETE FROM lock WHERE name IN (SELECT name FROM lock WHERE {which} AND name > ?4 ORDER BY name LIMIT ?3)
    RETURNING name
    """)
    for which in (EXPIRED, IDLE)
)


def data_version(connection: sqlite3.Connection, parameters: Parameters) -> int:
    """Goes up when another connection has written."""
    version: int = connection.execute("PRAGMA data_version").fetchone()[0]
    return version


@functools.cache
def scan(fields: Sequence[str]) -> Statement:
    """Name and ``fields`` of the live holds in one stretch."""
    columns = ", ".join(["name", *(_COLUMNS.get(field, field) for field in fields)])
    return Statement(f"SELECT {columns} FROM lock WHERE name > ?2 AND name <= ?3 AND owner <> '' AND expires > ?1")


@functools.cache
def scan_members(fields: Sequence[str]) -> Statement:
    """The same of the shared and placed ones, by their ids, which come first."""
    columns = ", ".join(["id", "name", *("expires - ?1" if field == "expires_in" else field for field in fields)])
    return Statement(f"SELECT {columns} FROM member WHERE id > ?2 AND expires > ?1 ORDER BY id LIMIT ?3")
