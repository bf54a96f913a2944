"""What the advisory backend says to PostgreSQL: keys, statements, and what ``pg_locks`` shows.

A key is 64 bits of a hash, in the space of advisory locks with one ``bigint``. Holds of this package are told from
other people's locks by the name of the application on their sessions. What ``pg_locks`` cannot say, the name and
the holder, is in :class:`~angee_jobs.models.SessionHold`, for holds older than ``PUBLISH_SECONDS``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import threading
import weakref
from collections.abc import Iterable, Sequence

from ... import clock
from ...errors import LockBackendError
from ...keys import LockKey
from ..base import Grant, Record
from ..postgres import tokens
from ..postgres.errors import NoAnswer, SessionLost, driver_errors
from ..postgres.session import Session
from ..postgres.statements import Request, Row, Statement, number

#: Names the sessions that carry holds in ``pg_stat_activity``, and tells them from others that use advisory locks.
APPLICATION = "angee_jobs locks"
#: The channel on which releases are told to those who wait.
CHANNEL = "angee_jobs_advisory"
#: A hold is published in the background when it is this old, in seconds.
PUBLISH_SECONDS = 0.9
#: The server's side of a direct connection: a host that vanished frees its locks after at most 25 seconds.
SERVER_SETTINGS = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
#: The client's side, unless the user has set them: a server that vanished is noticed after at most 25 seconds.
CLIENT_SETTINGS = {
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}

_KEY = "((l.classid::bigint << 32) | l.objid::bigint)"
_GRANTED = """
    l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_HELD = f"{_GRANTED} AND l.mode = 'ExclusiveLock'"
_COLUMNS = f"{_KEY}, l.pid, h.name, h.holder, extract(epoch FROM h.acquired_at), h.fencing_token"
_PUBLISHED = f"LEFT JOIN angee_jobs_sessionhold AS h ON h.advisory_key = {_KEY} AND h.server_pid = l.pid"

#: The server's process, the time, and the fencing token, drawn after the grant. No token: refused. -1: nothing can be
#: written here, so that the token would fail after the lock was granted.
ACQUIRE = Statement(f"""
    SELECT pg_backend_pid(), extract(epoch FROM clock_timestamp()), CASE
        WHEN current_setting('transaction_read_only') = 'on' THEN -1
        WHEN pg_try_advisory_lock($1::bigint) THEN {tokens.draw(durable=False)}
    END
""")
# The marker can be taken unless there are waiters, and is given back with the end of the statement.
_UNLOCK = f"""
    pg_advisory_unlock($1::bigint),
    CASE WHEN NOT pg_try_advisory_xact_lock($2::bigint) THEN pg_notify('{CHANNEL}', $1::bigint::text) END
"""
_UNPUBLISHED = """
    WITH unpublished AS (
        DELETE FROM angee_jobs_sessionhold WHERE advisory_key = (
            SELECT advisory_key FROM angee_jobs_sessionhold
            WHERE advisory_key = $1::bigint AND server_pid = pg_backend_pid()
                AND set_config('synchronous_commit', 'off', true) <> ''
            FOR UPDATE SKIP LOCKED
        )
    )
"""
RELEASE, RELEASE_PUBLISHED = Statement(f"SELECT {_UNLOCK}"), Statement(f"{_UNPUBLISHED} SELECT {_UNLOCK}")
# Shared and placed holds. Each has a key of its own, locked exclusively, and the key of the lock in share mode.
#: The first key that is free of those in $2, from 1; -1: none, or an exclusive waiter's word ($3) stands; -2: there is
#: an exclusive hold. One key after the other, and none after the first that was got: so a recursive query does it.
JOIN = Statement(f"""
    WITH tried AS MATERIALIZED (SELECT CASE
        WHEN current_setting('transaction_read_only') = 'on' THEN -3
        WHEN NOT pg_try_advisory_lock_shared($1::bigint) THEN -2
        WHEN EXISTS (
            SELECT FROM angee_jobs_sessionhold
            WHERE advisory_key = $3::bigint AND server_pid = 0 AND acquired_at > clock_timestamp()
        ) THEN -1
        ELSE coalesce((
            WITH RECURSIVE try (i, got) AS (
                SELECT 1, pg_try_advisory_lock(($2::text::bigint[])[1])
                UNION ALL
                SELECT i + 1, pg_try_advisory_lock(($2::text::bigint[])[i + 1])
                FROM try WHERE NOT got AND i < cardinality($2::text::bigint[])
            )
            SELECT i FROM try WHERE got
        ), -1)
    END AS at)
    SELECT pg_backend_pid(), extract(epoch FROM clock_timestamp()), CASE
        WHEN at = -3 THEN -1
        WHEN at = -1 AND pg_advisory_unlock_shared($1::bigint) THEN NULL
        WHEN at > 0 THEN {tokens.draw(durable=False)}
    END, at FROM tried
""")
_LEAVE = f"""
    pg_advisory_unlock($1::bigint), pg_advisory_unlock_shared($3::bigint),
    CASE WHEN NOT pg_try_advisory_xact_lock($2::bigint) THEN pg_notify('{CHANNEL}', $3::bigint::text) END
"""
LEAVE, LEAVE_PUBLISHED = Statement(f"SELECT {_LEAVE}"), Statement(f"{_UNPUBLISHED} SELECT {_LEAVE}")
LEAVE_QUIETLY = Statement("SELECT pg_advisory_unlock($1::bigint), pg_advisory_unlock_shared($2::bigint)")
UNLOCK_SHARED = Statement("SELECT pg_advisory_unlock_shared($1::bigint)")
#: Whether this session has the key in share mode.
SHARES = Statement(f"""
    SELECT 1 FROM pg_locks AS l WHERE {_GRANTED} AND l.mode = 'ShareLock' AND l.pid = pg_backend_pid()
        AND l.classid = $1::text::oid AND l.objid = $2::text::oid
""")
#: An exclusive waiter's word: a row of no server process, that stands until its time, if others hold the key.
WANT = Statement(f"""
    INSERT INTO angee_jobs_sessionhold AS h (advisory_key, server_pid, name, holder, acquired_at, fencing_token)
    SELECT $1::bigint, 0, '', '', clock_timestamp() + $2::text::interval, 0
    FROM pg_locks AS l WHERE {_GRANTED} AND l.mode = 'ShareLock'
        AND l.classid = $3::text::oid AND l.objid = $4::text::oid
        AND set_config('synchronous_commit', 'off', true) || set_config('lock_timeout', '100', true) <> ''
    LIMIT 1
    ON CONFLICT (advisory_key) DO UPDATE SET acquired_at = greatest(h.acquired_at, excluded.acquired_at)
    RETURNING 1
""")
UNWANT = Statement("DELETE FROM angee_jobs_sessionhold WHERE advisory_key = $1::bigint AND server_pid = 0")
UNLOCK = Statement("SELECT pg_advisory_unlock($1::bigint)")
MARK = Statement("SELECT pg_try_advisory_lock_shared($1::bigint)")
UNMARK = Statement("SELECT pg_advisory_unlock_shared(marker) FROM unnest($1::text::bigint[]) AS marker")
PUBLISH = Statement("""
    INSERT INTO angee_jobs_sessionhold AS h (advisory_key, server_pid, name, holder, acquired_at, fencing_token)
    SELECT key, pg_backend_pid(), name, holder, to_timestamp(acquired_at), token
    FROM jsonb_to_recordset($1::jsonb) AS new (key bigint, name text, holder text, acquired_at float8, token bigint)
    WHERE set_config('synchronous_commit', 'off', true) || set_config('lock_timeout', '100', true) <> ''
    ON CONFLICT (advisory_key) DO UPDATE SET
        server_pid = excluded.server_pid, name = excluded.name, holder = excluded.holder,
        acquired_at = excluded.acquired_at, fencing_token = excluded.fencing_token
""")
PRUNE = Statement(f"""
    DELETE FROM angee_jobs_sessionhold WHERE advisory_key IN (
        SELECT h.advisory_key FROM angee_jobs_sessionhold AS h
        WHERE NOT EXISTS (SELECT FROM pg_locks AS l WHERE {_HELD} AND l.pid = h.server_pid AND {_KEY} = h.advisory_key)
            AND (h.server_pid <> 0 OR h.acquired_at < clock_timestamp())
        FOR UPDATE SKIP LOCKED
    ) AND set_config('synchronous_commit', 'off', true) <> ''
""")
MINE = Statement(f"SELECT {_KEY} FROM pg_locks AS l WHERE {_HELD} AND l.pid = pg_backend_pid()")
INSPECT = Statement(f"""
    SELECT {_COLUMNS} FROM pg_locks AS l {_PUBLISHED}
    WHERE {_HELD} AND l.classid = $1::text::oid AND l.objid = $2::text::oid
""")
#: All holds of a name ($1), of which an exclusive one and those in the first places ($2) are known before they are
#: published, and the sessions that have its key in share mode.
INSPECT_HOLDS = Statement(f"""
    SELECT {_COLUMNS}, l.mode FROM pg_locks AS l {_PUBLISHED}
    WHERE {_GRANTED} AND (
        (l.mode = 'ExclusiveLock' AND (h.name = $1::text OR {_KEY} = ANY ($2::text::bigint[])))
        OR (l.mode = 'ShareLock' AND l.classid = $3::text::oid AND l.objid = $4::text::oid)
    )
""")
LIST = Statement(f"""
    SELECT {_COLUMNS} FROM pg_locks AS l
    JOIN pg_stat_activity AS a ON a.pid = l.pid AND a.application_name LIKE '{APPLICATION}%' {_PUBLISHED}
    WHERE {_HELD}
""")
LIST_SESSION = Statement(f"SELECT {_COLUMNS} FROM pg_locks AS l {_PUBLISHED} WHERE {_HELD} AND l.pid = $1::int")
#: With the time, since it is heard late: by then the session may have another hold of the key, which was not meant.
ASK = Statement("SELECT pg_notify($1::text, $2::text || ':' || extract(epoch FROM clock_timestamp()))")
TERMINATE = Statement("SELECT pg_terminate_backend($1::int)")
#: The end of a holder's text that is published, if the hold has a place.
_PLACE = re.compile(rb', "place": ([0-9]{1,4})}$')
_PID = Statement("SELECT pg_backend_pid()")
#: A session whose request gets no answer for this many seconds is suspect. The server is asked about it.
SILENT_SECONDS = 2.0
_STATE = Statement("SELECT state FROM pg_stat_activity WHERE pid = $1::int")
_END = Statement(f"""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid = $1::int AND application_name LIKE '{APPLICATION}%' AND state = 'idle'
""")


@functools.lru_cache(4096)  # asked for at the acquire and at the release
def advisory_key(name: str, space: str = "lock") -> int:
    """64 bits that stand for ``name``. Never to be changed: two releases of this package must agree on them."""
    digest = hashlib.sha256(f"angee_jobs:{space}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def marker_key(name: str) -> int:
    """The advisory lock that the waiters of ``name`` share."""
    return advisory_key(name, "waiters")


def halves(key: int) -> tuple[int, int]:
    """``classid`` and ``objid`` of a key in ``pg_locks``, which are unsigned."""
    return (key >> 32) & 0xFFFFFFFF, key & 0xFFFFFFFF


def ask_channel(server_pid: int) -> str:
    """Where the session of that server process is asked to give up a hold."""
    return f"angee_jobs_ask_{server_pid}"


class Asking:
    """In the frame that tries for a lock: it is asked for as long as this exists, whatever ends the frame."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class Entry:
    """One hold of this process, or a try that has not been answered yet."""

    __slots__ = (
        "acquired_at",
        "asking",
        "gate",
        "granted",
        "holder",
        "key",
        "name",
        "owner",
        "place",
        "published",
        "session",
        "token",
        "unlocking",
    )

    def __init__(self, name: str, key: int, owner: str, holder: str, asking: Asking) -> None:
        self.asking = weakref.ref(asking)
        self.name = name
        self.key = key
        self.owner = owner
        self.holder = holder
        #: The session that the request went to; None: none was sent.
        self.session: Session | None = None
        #: When it was granted on the local clock; None: not yet, as far as is known.
        self.granted: float | None = None
        self.acquired_at = 0.0
        self.token = 0
        self.published = False
        #: Of a shared or placed hold, the key of the lock, and the place; 0 of an exclusive one.
        self.gate = 0
        self.place: int | None = None
        #: The request that frees it, if its answer was not waited for.
        self.unlocking: Request | None = None

    @property
    def asked_for_here(self) -> bool:
        """Whether this very thread is just asking for it, and is interrupted by a signal handler."""
        asking = self.asking()
        return asking is not None and asking.thread == threading.get_ident()

    @property
    def alive(self) -> bool:
        """False if it was on a session that is gone. True also for a try that was not sent yet."""
        return self.session is None or self.session.open

    def grant(self, row: Row) -> Grant:
        self.acquired_at = number(row[1]) or 0.0
        self.token = int(row[2] or 0)
        self.granted = clock.now()
        return Grant(self.token, self.acquired_at, None, self.place)

    def note(self) -> str:
        """The holder as it is published, which tells the place too."""
        if self.place is None or not self.holder.endswith("}"):
            return self.holder
        return f'{self.holder[:-1]}, "place": {self.place}}}'

    def record(self) -> Record:
        return Record(self.name, self.holder, self.acquired_at, None, None, self.token, self.place)


def notes(entries: Iterable[Entry]) -> str:
    """What PUBLISH takes."""
    keys = ("key", "name", "acquired_at", "token")
    return json.dumps([{"holder": entry.note(), **{key: getattr(entry, key) for key in keys}} for entry in entries])


def record(row: Row, name: str | None = None) -> Record:
    """What ``pg_locks`` and the published note say. Without a note the key is all that is known of the name."""
    key, _, published, holder, acquired_at, token = row[:6]
    if name is None:
        if published is None:
            name = LockKey("unpublished", (f"{int(key or 0) & 0xFFFFFFFFFFFFFFFF:016x}",)).name
        else:
            name = published.decode()
    return Record(
        name=name,
        holder=None if holder is None else holder.decode(),
        acquired_at=number(acquired_at),
        expires_at=None,
        expires_in=None,
        fencing_token=None if token is None else int(token),
        place=None if (found := _PLACE.search(holder or b"")) is None else int(found[1]),
    )


def waits_for_client(session: Session, server_pid: int, deadline: float) -> bool:
    """Whether the session of ``server_pid`` is gone, or has nothing to do, as far as the server knows."""
    rows = session.execute(_STATE, [server_pid], deadline)
    return not rows or rows[0][0] == b"idle"


def end_session(session: Session, server_pid: int, deadline: float) -> None:
    """End an idle session of ours, so that what it holds is free at once, and not only when the server misses it."""
    with contextlib.suppress(NoAnswer, SessionLost, driver_errors()):
        session.execute(_END, [server_pid], deadline)


def check_answer(session: Session, row: Row) -> None:
    """LockBackendError if the server cannot grant locks here, or has answered by another session."""
    if row[2] == b"-1":
        raise LockBackendError(f"The database {session.alias!r} is read-only here, and fencing tokens need writing")
    if not session.direct and int(row[0] or 0) != session.server_pid:
        raise pooling_error(session.alias)


def pooling_error(alias: str) -> LockBackendError:
    return LockBackendError(
        f"The database {alias!r} is reached through a pooler that gives every transaction another session, which "
        f"breaks session locks silently. Give PostgresAdvisoryLockBackend an alias that connects directly or through "
        f"session pooling, or use TableLockBackend, which works through any pooler."
    )


def refuse_transaction_pooling(session: Session, deadline: float) -> None:
    """LockBackendError unless the server's session behind a pooled connection is this connection's alone.

    Proof of the contrary is one server process that answers two connections which are open at once, or another process
    for the next transaction of one connection. Whether a pooler shares sessions cannot be asked. No answer in time
    proves nothing, and is an error too.
    """
    seen: Sequence[set[int]] = (set(), set())
    try:
        second = Session(session.alias, deadline)
        try:
            for turn in _TURNS:
                [(pid,)] = (session, second)[turn].execute(_PID, [], deadline)
                seen[turn].add(int(pid or 0))
        finally:
            second.close()
    except (NoAnswer, SessionLost) as error:
        raise LockBackendError(
            f"The database {session.alias!r} is reached through a pooler, and session locks need a session of their "
            f"own. Whether they get one could not be found out with a second connection: {error}"
        ) from error
    if len(seen[0]) > 1 or len(seen[1]) > 1 or seen[0] & seen[1]:
        raise pooling_error(session.alias)


#: Who asks next. Not in turns: a pooler that gives its sessions out in turn would always give both the same.
_TURNS = (0, 1, 1, 0, 0, 0, 1, 1, 0, 1)
