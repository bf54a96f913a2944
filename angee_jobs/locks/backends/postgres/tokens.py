"""How both PostgreSQL backends draw a fencing token: never below the server's clock, never below an earlier token.

The sequence remembers the highest token of any key, since each token sets it forward to the clock. So tokens go up
while the clock does, whatever becomes of the sequence: restarted, restored from a dump, behind after a crash, a
fail-over or a cut-over. And they go up while the sequence does, whatever becomes of the clock: set back, or too coarse
to tell two grants apart. Only both at once take a token back: a crash while the clock is behind the sequence, or two
sessions that set the sequence in one microsecond, just before the clock is set back. To exclude that, each grant would
have to wait for the disk, or for a lock of the whole database.
"""

from __future__ import annotations

#: Made by the first migration; owned by no table, so that ``manage.py flush`` leaves it alone.
SEQUENCE = "angee_jobs_fencing_token"

_MICROSECONDS = "floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"


def draw(*, above: str = "", durable: bool) -> str:
    """The SQL expression that draws a token when it is evaluated. With ``above``: higher than that token.

    Not ``durable``: the statement does not wait for the disk if the clock alone makes sure that a crash of the server
    takes no token back. That is ten times faster, and nothing else in the statement may need the wait.
    """
    floor = f"greatest({_MICROSECONDS}, {above} + 1)" if above else _MICROSECONDS
    hurry = "" if durable else " AND set_config('synchronous_commit', 'off', true) <> ''"
    # A role that was granted USAGE alone may not set the sequence: its tokens rely on the clock.
    return f"""(
        SELECT CASE
            WHEN drawn >= floor THEN drawn
            WHEN has_sequence_privilege('{SEQUENCE}', 'UPDATE'){hurry} THEN setval('{SEQUENCE}', floor)
            ELSE floor
        END FROM (SELECT nextval('{SEQUENCE}') AS drawn, {floor} AS floor OFFSET 0) AS token
    )"""
