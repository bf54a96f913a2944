"""What the lock table on SQLite says to its file: the schema, the clock, the statements."""

from __future__ import annotations

import functools
import operator
import re
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from ... import clock

#: Says in the file's header that it is ours, and that its tables are those below.
APPLICATION_ID = 0x616E6765  # "ange"
VERSION = 1


def _boot() -> str:
    """What tells this boot of this machine from any other; empty where the clock is the wall clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return boot if hasattr(time, "CLOCK_BOOTTIME") else ""
    except OSError:
        return ""


BOOT = _boot()
now = clock.now if BOOT else time.time

SCHEMA = f"""
CREATE TABLE lock (
    name TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    holder TEXT NOT NULL,
    boot TEXT NOT NULL,
    acquired_at REAL NOT NULL,
    expires REAL NOT NULL,
    fencing_token INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE floor (fencing_token INTEGER NOT NULL);
INSERT INTO floor VALUES (0);
PRAGMA user_version = {VERSION};
PRAGMA application_id = {APPLICATION_ID};
"""


class Statement:
    """SQL with numbered parameters; ?1 and ?2 are in each the boot and the time of this machine, by its clock.

    SQLite is given plain ones, since Python 3.12.0 to 3.12.3 take a number for a name, and warn at every call.
    """

    def __init__(self, numbered: str) -> None:
        self.sql = re.sub(r"\?\d+", "?", numbered)
        self._pick = operator.itemgetter(*(int(number) - 1 for number in re.findall(r"\?(\d+)", numbered)))

    def __call__(self, connection: sqlite3.Connection, *parameters: Any) -> sqlite3.Cursor:
        return connection.execute(self.sql, self._pick((BOOT, now(), *parameters)))


ACQUIRE = Statement("""
INSERT INTO lock VALUES (
    ?3, ?4, ?5, ?1, ?6, ?2 + ?7,
    max(CAST(?6 * 1000000 AS INTEGER), coalesce((SELECT fencing_token FROM floor), 0) + 1)
)
ON CONFLICT (name) DO UPDATE SET
    owner = excluded.owner, holder = excluded.holder, boot = excluded.boot, acquired_at = excluded.acquired_at,
    expires = excluded.expires, fencing_token = max(excluded.fencing_token, lock.fencing_token + 1)
WHERE lock.expires <= ?2 OR lock.boot <> ?1
RETURNING fencing_token
""")
EXTEND = Statement("""
UPDATE lock SET expires = max(expires, ?2 + batch.ttl)
FROM (
    SELECT json_extract(value, '$[0]') AS name, json_extract(value, '$[1]') AS owner, json_extract(value, '$[2]') AS ttl
    FROM json_each(?3)
) AS batch
WHERE lock.name = batch.name AND lock.owner = batch.owner AND lock.expires > ?2 AND lock.boot = ?1
RETURNING owner
""")
FREE = "owner = '', holder = '', expires = ?2"
RELEASE = Statement(f"UPDATE lock SET {FREE} WHERE name = ?3 AND owner = ?4 AND expires > ?2 AND boot = ?1")
FORCE_RELEASE = Statement(f"UPDATE lock SET {FREE} WHERE name = ?3")
ADOPT = Statement("""
UPDATE lock SET owner = ?5, holder = ?6, expires = ?2 + ?7
WHERE name = ?3 AND owner = ?4 AND expires > ?2 AND boot = ?1
RETURNING fencing_token, acquired_at
""")
RECORD = "SELECT name, holder, acquired_at, expires - ?2, fencing_token, boot = ?1 FROM lock"
INSPECT = Statement(f"{RECORD} WHERE name = ?3 AND expires > ?2 AND boot = ?1")
INSPECT_MANY = Statement(f"{RECORD} WHERE name IN (SELECT value FROM json_each(?3)) AND expires > ?2 AND boot = ?1")
HELD = Statement(f"{RECORD} WHERE name > ?3 AND expires > ?2 AND boot = ?1 ORDER BY name LIMIT ?4")
#: Where a stretch of so many rows ends. A scan takes one after the other, live or not, so that none lasts long.
STRETCH = Statement("SELECT name FROM lock WHERE name > ?3 ORDER BY name LIMIT 1 OFFSET ?4")
_COLUMNS = {"expires_in": "expires - ?2"}
EXPIRED = "owner <> '' AND (expires <= ?2 - ?3 OR boot <> ?1)"
LIST_EXPIRED = Statement(f"{RECORD} WHERE {EXPIRED} AND name > ?4 ORDER BY name LIMIT ?5")
REMAINING = Statement("SELECT expires - ?2 FROM lock WHERE name = ?3 AND expires > ?2 AND boot = ?1")
IDLE = "owner = '' AND (expires <= ?2 - ?3 OR boot <> ?1)"
REMOVE_EXPIRED, REMOVE_IDLE = (
    Statement(f"""
    DELETE FROM lock WHERE name IN (SELECT name FROM lock WHERE {which} AND name > ?5 ORDER BY name LIMIT ?4)
    RETURNING name, fencing_token
    """)
    for which in (EXPIRED, IDLE)
)
RAISE_FLOOR = "UPDATE floor SET fencing_token = max(fencing_token, ?)"


@functools.cache
def scan(fields: Sequence[str]) -> Statement:
    """Name and ``fields`` of the live holds in one stretch."""
    columns = ", ".join(["name", *(_COLUMNS.get(field, field) for field in fields)])
    return Statement(f"SELECT {columns} FROM lock WHERE name > ?3 AND name <= ?4 AND expires > ?2 AND boot = ?1")
