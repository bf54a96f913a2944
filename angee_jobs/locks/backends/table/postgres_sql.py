"""What the lock table on PostgreSQL says to the server."""

from __future__ import annotations

from ..postgres import tokens
from ..postgres.statements import Statement

#: Free rows are removed when they have not been used for this many seconds.
IDLE_SECONDS = 60
#: How many rows are looked at by the way, to be removed if they are free and idle.
TIDY_ROWS = 8000
#: How long a release tells the waiters after they have asked for it, and when they ask anew, in seconds: one of those
#: who look once a second at the latest does so in time.
WAITED_SECONDS, WAITED_ANEW = 3, 1.5
#: On which releases are told.
CHANNEL = "angee_jobs_table"

TABLE = "angee_jobs_tasklock"
LIVE = "owner <> '' AND expires_at > clock_timestamp()"
DURABLE = "set_config('synchronous_commit', 'on', true)"
# Settings of this statement alone. As conditions, they are met before a row is locked. What makes or prolongs a hold
# must survive a crash of the server, since the holder believes in it. What ends one need not: its lease ends it then.
QUICKLY = "set_config('synchronous_commit', 'off', true) || set_config('lock_timeout', {}, true) <> ''"
RECORD = """
    name, holder, extract(epoch FROM acquired_at), extract(epoch FROM expires_at),
    extract(epoch FROM expires_at - clock_timestamp()), fencing_token
"""
# The commit fails if it cannot be queued, as when a listener keeps a transaction open: then the same goes without.
NOTIFY = f"CASE WHEN waited_until > clock_timestamp() THEN pg_notify('{CHANNEL}', digest) END"

_ACQUIRE = f"""
    INSERT INTO {TABLE} AS lock
        (digest, name, owner, holder, acquired_at, expires_at, fencing_token)
    SELECT $1::varchar, $2::text, $3::varchar, $4::text, clock_timestamp(),
        clock_timestamp() + $5::float8 * interval '1 second', {tokens.draw(durable=True)}
    WHERE NOT EXISTS (SELECT FROM {TABLE} WHERE digest = $1::varchar AND owner <> $3::varchar AND {LIVE}) {{turn}}
        AND set_config('lock_timeout', $6::text, true) || {DURABLE} <> ''
    ON CONFLICT (digest) DO UPDATE SET
        owner = excluded.owner, holder = excluded.holder, acquired_at = clock_timestamp(),
        expires_at = clock_timestamp() + $5::float8 * interval '1 second',
        fencing_token = {tokens.draw(above="lock.fencing_token", durable=True)}
    WHERE lock.owner = '' OR lock.expires_at <= clock_timestamp() OR lock.owner = excluded.owner
    RETURNING fencing_token, extract(epoch FROM acquired_at), extract(epoch FROM expires_at)
"""
ACQUIRE = Statement(_ACQUIRE.format(turn=""))
# Of many that are woken by one release, all but one are turned away before they write anything. A try that waits in
# the server for the winner's row writes and syncs too, only to be refused.
ACQUIRE_NEXT = Statement(
    f"""
    WITH free AS MATERIALIZED (
        SELECT digest FROM {TABLE} WHERE digest = $1::varchar AND (owner = $3::varchar OR NOT ({LIVE}))
        FOR UPDATE SKIP LOCKED
    )
    """
    + _ACQUIRE.format(
        turn=f"AND (EXISTS (SELECT FROM free) OR NOT EXISTS (SELECT FROM {TABLE} WHERE digest = $1::varchar))"
    )
)
EXTEND = Statement(f"""
    UPDATE {TABLE} AS lock
    SET expires_at = greatest(lock.expires_at, clock_timestamp() + batch.ttl * interval '1 second')
    FROM unnest($1::text[], $2::text[], $3::float8[]) AS batch (digest, owner, ttl)
    WHERE lock.digest = batch.digest::varchar AND lock.owner = batch.owner AND lock.expires_at > clock_timestamp()
        AND set_config('lock_timeout', $4::text, true) || {DURABLE} <> ''
    RETURNING lock.owner
""")
_RELEASE = f"""
    UPDATE {TABLE} SET owner = '', expires_at = clock_timestamp()
    WHERE digest = $1 AND owner = $2 AND expires_at > clock_timestamp() AND {QUICKLY.format("$3::text")}
    RETURNING {{tell}}
"""
RELEASE, RELEASE_SILENTLY = Statement(_RELEASE.format(tell=NOTIFY)), Statement(_RELEASE.format(tell="NULL"))
ADOPT = Statement(f"""
    UPDATE {TABLE}
    SET owner = $3, holder = $4, expires_at = clock_timestamp() + $5::float8 * interval '1 second'
    WHERE digest = $1 AND owner = $2 AND expires_at > clock_timestamp()
        AND set_config('lock_timeout', $6::text, true) || {DURABLE} <> ''
    RETURNING fencing_token, extract(epoch FROM acquired_at), extract(epoch FROM expires_at)
""")
SCAN_COLUMNS = {
    "holder": "holder",
    "acquired_at": "extract(epoch FROM acquired_at)",
    "expires_in": "extract(epoch FROM expires_at - clock_timestamp())",
    "fencing_token": "fencing_token",
    "place": "place",
}
OVER = "owner NOT IN ('', '*') AND expires_at <= clock_timestamp() - {} * interval '1 second'"
PAGE = f"SELECT digest, {RECORD} FROM {TABLE} WHERE digest > $1 AND {{}} ORDER BY digest LIMIT {{}}"
PAGE_ROWS = 1000
DIGESTS = Statement(f"SELECT digest FROM {TABLE} WHERE {LIVE}")
EXPIRED = Statement(PAGE.format(OVER.format("$2::float8"), PAGE_ROWS))
REAP = Statement(f"""
    WITH dead AS (
        SELECT digest, expires_at FROM {TABLE} WHERE {OVER.format("$1::float8")} AND digest > $3::varchar
        ORDER BY digest LIMIT $2::int FOR UPDATE SKIP LOCKED
    ), removed AS (
        DELETE FROM {TABLE} USING dead
        WHERE {TABLE}.digest = dead.digest AND dead.expires_at <= clock_timestamp() - interval '{IDLE_SECONDS} seconds'
    ), freed AS (
        UPDATE {TABLE} SET owner = '' FROM dead
        WHERE {TABLE}.digest = dead.digest AND dead.expires_at > clock_timestamp() - interval '{IDLE_SECONDS} seconds'
    )
    SELECT count(*), max(digest) FROM dead
""")
IDLE = f"owner IN ('', '*') AND expires_at <= clock_timestamp() - interval '{IDLE_SECONDS} seconds'"


def sweep(table: str, key: str) -> Statement:
    """Remove at most ``$1`` of the rows that are free and idle."""
    return Statement(f"""
        WITH idle AS (
            DELETE FROM {table} WHERE ({key}) IN (
                SELECT {key} FROM {table} WHERE {IDLE} LIMIT $1::int FOR UPDATE SKIP LOCKED
            ) RETURNING digest
        ) SELECT count(*) FROM idle
    """)


def tidy(table: str, key: str) -> Statement:
    """Remove them among some rows that follow the digest ``$1``."""
    return Statement(f"""
        DELETE FROM {table} WHERE ({key}) IN (
            SELECT {key} FROM {table}
            WHERE ({key}) IN (SELECT {key} FROM {table} WHERE digest >= $1 ORDER BY {key} LIMIT {TIDY_ROWS}) AND {IDLE}
            FOR UPDATE SKIP LOCKED
        ) AND set_config('synchronous_commit', 'off', true) <> ''
    """)


SWEEP, TIDY = sweep(TABLE, "digest"), tidy(TABLE, "digest")
LEFT = Statement(f"""
    SELECT extract(epoch FROM expires_at - clock_timestamp()), extract(epoch FROM waited_until - clock_timestamp()),
        owner = '*'
    FROM {TABLE} WHERE digest = $1 AND {LIVE}
""")
MARK = Statement(f"""
    UPDATE {TABLE} SET waited_until = clock_timestamp() + interval '{WAITED_SECONDS} seconds'
    WHERE digest = $1 AND {LIVE} AND {QUICKLY.format("$2::text")}
    RETURNING extract(epoch FROM expires_at - clock_timestamp())
""")
