"""What the lock table on PostgreSQL says to the server about places and shared holds.

Each of them is a row of its own, of :class:`~angee_jobs.models.LockMember`. A shared hold takes the lowest free number
from ``FIRST_SHARED`` on, so that rows are used again. While members live, the row of the key itself is their *gate*:
its owner is ``*``, and it ends with the last of them, so that an exclusive hold asks about that one row as ever.

Members come, go and are renewed under the row lock of their gate, taken first. Whoever counts them does so in a later
statement of the same transaction, since a statement sees nothing that was committed after it began, while it waited.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..postgres import tokens
from ..postgres.statements import Statement
from .postgres_sql import (
    DURABLE,
    LIVE,
    NOTIFY,
    PAGE_ROWS,
    QUICKLY,
    RECORD,
    SCAN_COLUMNS,
    TABLE,
    WAITED_SECONDS,
    sweep,
    tidy,
)

MEMBERS = "angee_jobs_lockmember"
#: The number of the first shared hold, above all places; and of an exclusive waiter's word.
FIRST_SHARED, WORD = 1000, -1

_GATE_LIVES = "owner = '*' AND expires_at > clock_timestamp()"
_RETURNS = "fencing_token, extract(epoch FROM acquired_at), extract(epoch FROM expires_at), number"
# A word that was left before the last exclusive hold began has been heard.
_WORD = f"""
    {MEMBERS} AS word WHERE word.digest = $1::varchar AND word.number = {WORD}
        AND word.expires_at > clock_timestamp() AND word.acquired_at >= coalesce(
            (SELECT acquired_at FROM {TABLE} WHERE digest = $1::varchar), '-infinity')
"""
_OTHERS = f"digest = $1::varchar AND owner <> $3::varchar AND {LIVE}"
_MINE = f"digest = $1::varchar AND owner = $3::varchar AND {LIVE}"

# The lowest free number is the first, or follows one that is taken.
_FIRST = f"CASE WHEN $5::int IS NULL THEN {FIRST_SHARED} ELSE 0 END"
# The parameters of an entry: digest, name, owner, how long to wait for the gate, the number of places (NULL: a shared
# hold), holder, ttl. The first statement makes the gate if need be, and locks it, but only for one who may get in: one
# who is refused writes nothing. It waits for no disk, until there is a grant.
_GATE = f"""
    INSERT INTO {TABLE} AS lock (digest, name, owner, holder, acquired_at, expires_at, fencing_token)
    SELECT $1::varchar, $2::text, '', '', clock_timestamp(), clock_timestamp(), 0
    WHERE CASE WHEN NOT EXISTS (SELECT FROM {TABLE} WHERE digest = $1::varchar AND owner <> '*' AND {LIVE}) AND (
            NOT EXISTS (SELECT FROM {_WORD}) AND ($5::int IS NULL
                OR $5::int > (SELECT count(*) FROM {MEMBERS} WHERE {_OTHERS} AND number BETWEEN 0 AND $5::int - 1))
            OR EXISTS (SELECT FROM {MEMBERS} WHERE {_MINE})
        ) THEN set_config('angee_jobs.gate', $1::text, true) || {QUICKLY.format("$4::text")} END
    ON CONFLICT (digest) DO UPDATE SET owner = lock.owner WHERE false
"""
ENTER = Statement(
    f"""
    WITH gate AS MATERIALIZED (
        SELECT fencing_token, coalesce(
            (SELECT number FROM {MEMBERS} WHERE {_MINE}),
            CASE WHEN NOT EXISTS (SELECT FROM {_WORD}) THEN (
                SELECT min(number) FROM (
                    SELECT {_FIRST} AS number UNION ALL
                    SELECT number + 1 FROM {MEMBERS} WHERE digest = $1::varchar AND {LIVE}
                        AND number >= {_FIRST} AND number < coalesce($5::int - 1, 2147483647)
                ) AS next
                WHERE NOT EXISTS (
                    SELECT FROM {MEMBERS} AS taken
                    WHERE taken.digest = $1::varchar AND taken.number = next.number AND {LIVE}
                )
            ) END
        ) AS number
        FROM {TABLE}
        WHERE digest = $1::varchar AND current_setting('angee_jobs.gate', true) = $1::text
            AND (owner IN ('', '*') OR expires_at <= clock_timestamp())
    ), entered AS (
        INSERT INTO {MEMBERS} (digest, number, name, owner, holder, acquired_at, expires_at, fencing_token)
        SELECT $1::varchar, gate.number, $2::text, $3::varchar, $6::text, clock_timestamp(),
            clock_timestamp() + $7::float8 * interval '1 second',
            {tokens.draw(above="gate.fencing_token", durable=True)}
        FROM gate WHERE gate.number IS NOT NULL AND {DURABLE} <> ''
        ON CONFLICT (digest, number) DO UPDATE SET
            name = excluded.name, owner = excluded.owner, holder = excluded.holder,
            acquired_at = excluded.acquired_at, expires_at = excluded.expires_at, fencing_token = excluded.fencing_token
        RETURNING {_RETURNS}, expires_at
    ), opened AS (
        UPDATE {TABLE} AS lock
        SET owner = '*', holder = '', fencing_token = entered.fencing_token, expires_at = CASE
            WHEN lock.owner = '*' THEN greatest(lock.expires_at, entered.expires_at) ELSE entered.expires_at
        END
        FROM entered WHERE lock.digest = $1::varchar
    )
    SELECT * FROM entered
    """,
    after=_GATE,
)

# Of what changes or ends members: first the lock of the gate. The parameters begin with the digest, and how long to
# wait for it.
_LOCK = f"SELECT FROM {TABLE} WHERE digest = $1::varchar AND {QUICKLY.format('$2::text')} FOR NO KEY UPDATE"


def _close(those: str, tell: str) -> str:
    """The gate ends with the last of its members that are left, among them ``those`` as they will be."""
    return f"""
        UPDATE {TABLE} AS lock
        SET owner = CASE WHEN latest IS NULL THEN '' ELSE '*' END, expires_at = coalesce(latest, clock_timestamp())
        FROM (SELECT max(expires_at) AS latest FROM ({those}) AS remaining) AS remaining
        WHERE lock.digest = $1::varchar AND lock.owner = '*' AND EXISTS (SELECT FROM changed)
        RETURNING {tell} AS told
    """


_TELL = NOTIFY.replace("digest", "lock.digest")
_LEAVE = f"""
    WITH changed AS (
        UPDATE {MEMBERS} SET owner = '', expires_at = clock_timestamp() WHERE {_MINE} RETURNING number
    ), closed AS (
        {_close(f"SELECT expires_at FROM {MEMBERS} WHERE {_OTHERS}", "{tell}")}
    )
    SELECT changed.number, closed.told FROM changed LEFT JOIN closed ON true
"""
LEAVE = Statement(_LEAVE.format(tell=_TELL), after=_LOCK)
LEAVE_SILENTLY = Statement(_LEAVE.format(tell="NULL"), after=_LOCK)
ADOPT = Statement(
    f"""
    WITH changed AS (
        UPDATE {MEMBERS} SET owner = $4, holder = $5, expires_at = clock_timestamp() + $6::float8 * interval '1 second'
        WHERE {_MINE} AND EXISTS (SELECT FROM {TABLE} WHERE digest = $1::varchar AND {_GATE_LIVES}) AND {DURABLE} <> ''
        RETURNING {_RETURNS}, expires_at
    ), closed AS (
        {_close(f"SELECT expires_at FROM {MEMBERS} WHERE {_OTHERS} UNION ALL SELECT expires_at FROM changed", "NULL")}
    )
    SELECT * FROM changed
    """,
    after=_LOCK,
)
# The gates in one order, or two batches could wait for each other. It sees its own rows as they are when it has them;
# a gate only ever ends later by it, so that nothing need be counted.
EXTEND = Statement(f"""
    WITH batch AS MATERIALIZED (
        SELECT * FROM unnest($1::text[], $2::text[], $3::float8[]) AS batch (digest, owner, ttl)
    ), gates AS MATERIALIZED (
        SELECT digest FROM {TABLE} WHERE digest = ANY($1::text[]::varchar[]) AND {_GATE_LIVES}
            AND set_config('lock_timeout', $4::text, true) || {DURABLE} <> ''
        ORDER BY digest FOR NO KEY UPDATE
    ), extended AS (
        UPDATE {MEMBERS} AS member
        SET expires_at = greatest(member.expires_at, clock_timestamp() + batch.ttl * interval '1 second')
        FROM batch, gates
        WHERE member.digest = gates.digest AND gates.digest = batch.digest::varchar AND member.owner = batch.owner
            AND member.expires_at > clock_timestamp()
        RETURNING member.digest, member.owner, member.expires_at
    ), raised AS (
        UPDATE {TABLE} AS lock SET expires_at = greatest(lock.expires_at, latest.expires_at)
        FROM (SELECT digest, max(expires_at) AS expires_at FROM extended GROUP BY digest) AS latest
        WHERE lock.digest = latest.digest
    )
    SELECT owner FROM extended
""")

#: Every live hold, of whatever kind.
_COLUMNS = "digest, name, holder, acquired_at, expires_at, fencing_token, owner"
_PLACE = f"CASE WHEN number < {FIRST_SHARED} THEN number END"
HOLDS = f"""(
    SELECT {_COLUMNS}, NULL::int AS place, NULL::int AS number FROM {TABLE} WHERE owner <> '*'
    UNION ALL SELECT {_COLUMNS}, {_PLACE} AS place, number FROM {MEMBERS}
) AS hold"""
INSPECT = Statement(f"SELECT {RECORD}, place FROM {HOLDS} WHERE digest = $1::varchar AND {LIVE} LIMIT 1")
HELD = Statement(f"SELECT {RECORD}, place FROM {HOLDS} WHERE digest = ANY($1::text[]::varchar[]) AND {LIVE}")
_FORCE = f"""
    WITH held AS MATERIALIZED (
        SELECT {RECORD}, place, number FROM {HOLDS}
        WHERE digest = $1::varchar AND {LIVE} AND coalesce(fencing_token = $3::bigint, true) AND {DURABLE} <> ''
    ), left_members AS (
        UPDATE {MEMBERS} AS member SET owner = '', expires_at = clock_timestamp()
        FROM held WHERE member.digest = $1::varchar AND member.number = held.number
    ), ended AS (
        UPDATE {TABLE} AS lock
        SET owner = CASE WHEN latest IS NULL THEN '' ELSE '*' END, expires_at = coalesce(latest, clock_timestamp())
        FROM (
            SELECT max(expires_at) AS latest FROM {MEMBERS}
            WHERE digest = $1::varchar AND {LIVE} AND fencing_token <> $3::bigint
        ) AS remaining
        WHERE lock.digest = $1::varchar AND EXISTS (SELECT FROM held)
        RETURNING {{tell}} AS told
    )
    SELECT held.*, ended.told FROM held LEFT JOIN ended ON true
"""
FORCE = Statement(_FORCE.format(tell=_TELL), after=_LOCK)
FORCE_SILENTLY = Statement(_FORCE.format(tell="NULL"), after=_LOCK)

# Of expired members nothing need be kept: the row of the key knows the last token.
_MEMBER_OVER = "owner <> '' AND expires_at <= clock_timestamp() - {} * interval '1 second'"
EXPIRED = Statement(f"""
    SELECT digest, number, {RECORD}, {_PLACE} FROM {MEMBERS}
    WHERE (digest, number) > ($1::varchar, $2::int) AND {_MEMBER_OVER.format("$3::float8")}
    ORDER BY digest, number LIMIT {PAGE_ROWS}
""")
REAP = Statement(f"""
    WITH dead AS (
        SELECT digest, number FROM {MEMBERS} WHERE {_MEMBER_OVER.format("$1::float8")}
        LIMIT $2::int FOR UPDATE SKIP LOCKED
    ), removed AS (
        DELETE FROM {MEMBERS} AS member USING dead WHERE member.digest = dead.digest AND member.number = dead.number
    )
    SELECT count(*) FROM dead
""")
SWEEP, TIDY = sweep(MEMBERS, "digest, number"), tidy(MEMBERS, "digest, number")

# For one who waits for a place ($2: among so many), or for a shared hold (NULL): until when something is in the way.
_LEFT = f"""
    SELECT extract(epoch FROM until - clock_timestamp()), extract(epoch FROM waited_until - clock_timestamp())
    FROM (
        SELECT waited_until, CASE
            WHEN EXISTS (SELECT FROM {_WORD}) THEN (SELECT word.expires_at FROM {_WORD})
            WHEN owner NOT IN ('', '*') THEN expires_at
            WHEN $2::int <= (SELECT count(*) FROM {MEMBERS} WHERE {{placed}})
                THEN (SELECT min(expires_at) FROM {MEMBERS} WHERE {{placed}})
        END AS until FROM {TABLE} WHERE digest = $1::varchar
    ) AS gate WHERE until > clock_timestamp()
""".format(placed=f"digest = $1::varchar AND number BETWEEN 0 AND $2::int - 1 AND {LIVE}")
LEFT = Statement(_LEFT)
# Releases are told from now on; only what is in the way after that has not been told already.
MARK = Statement(
    _LEFT,
    after=f"""
    UPDATE {TABLE} SET waited_until = clock_timestamp() + interval '{WAITED_SECONDS} seconds'
    WHERE digest = $1::varchar AND {LIVE} AND {QUICKLY.format("$3::text")}
    """,
)
#: An exclusive waiter leaves word for ``$2`` seconds, while members hold the key.
WANT = Statement(f"""
    INSERT INTO {MEMBERS} AS word (digest, number, name, owner, holder, acquired_at, expires_at, fencing_token)
    SELECT digest, {WORD}, name, '', '', clock_timestamp(), clock_timestamp() + $2::float8 * interval '1 second', 0
    FROM {TABLE} WHERE digest = $1::varchar AND {_GATE_LIVES} AND {QUICKLY.format("$3::text")}
    ON CONFLICT (digest, number) DO UPDATE
    SET acquired_at = excluded.acquired_at, expires_at = greatest(word.expires_at, excluded.expires_at)
""")
#: Which keys are held, and by how many members.
STILL_HELD = Statement(f"""
    SELECT digest, CASE WHEN owner = '*' THEN (
        SELECT count(*) FROM {MEMBERS} AS member WHERE member.digest = lock.digest
            AND member.owner <> '' AND member.expires_at > clock_timestamp()
    ) END
    FROM {TABLE} AS lock WHERE digest = ANY($1::text[]::varchar[]) AND {LIVE}
""")


@functools.cache
def scan(fields: Sequence[str]) -> Statement:
    """Name and ``fields`` of all live holds."""
    columns = ", ".join(["name", *(SCAN_COLUMNS[field] for field in fields)])
    return Statement(f"SELECT {columns} FROM {HOLDS} WHERE {LIVE}")
