"""Rows of the lock table that somebody has edited by hand, as far as their columns take it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from angee_jobs.locks import (
    LockError,
    attach_lock,
    force_release,
    held_locks,
    lock,
    lock_backends,
    lock_info,
    reap_expired_locks,
    task_lock_is_held,
)
from angee_jobs.locks.operations import expired_locks
from tests.support.admin_page import URL, user_with
from tests.support.servers import PostgresServer

NAME = "angee:name:edited by hand"
HOLDERS = [
    "",
    "null",
    "[]",
    "{}",
    '{"host": null}',
    "[" * 20_000,
    '{"host": "h", "pid": 1e999}',
    '{"host": "h", "pid": "x", "ttl": {}}',
    '{"host": "h", "ttl": 1e999}',
    '{"host": "h", "ttl": NaN}',
    f'{{"host": "h", "ttl": 1{"0" * 400}}}',
    '{"host": "h", "ttl": -1}',
    '{"host": "\\ud800", "note": "\\udfff\\u0000", "task": "<script>alert(1)</script>"}',
    "x" * 100_000,
]


def everything(at: str) -> None:
    """Each question and operation: an answer or a documented error, and the other holds are listed all the same."""
    calls: list[Callable[[], Any]] = [
        lambda: task_lock_is_held("edited by hand", backend=at),
        lambda: str(lock_info("edited by hand", backend=at)).encode(),
        lambda: [str(info).encode(errors="backslashreplace") for info in held_locks(backend=at)],
        lambda: list(expired_locks(backend=at)),
        lambda: attach_lock("edited by hand", "someone", backend=at),
        lambda: lock("edited by hand", backend=at).acquire(0.05),
    ]
    for call in calls:
        with contextlib.suppress(LockError):
            call()
    with lock("another", backend=at):
        assert "angee:name:another" in {info.name for info in held_locks(backend=at)}
    for call in (lambda: force_release("edited by hand", backend=at), lambda: reap_expired_locks(backend=at)):
        with contextlib.suppress(LockError):
            call()


def commands_and_page(at: str, names: list[str], client: Client) -> None:
    """With many such rows at once."""
    for command in ("list_locks", "reap_locks"):
        for how in ("text", "json"):
            call_command(command, backend=at, format=how)
    for order in ("key", "-holder", "since", "-expires", "token"):
        page = client.get(URL, {"backend": at, "o": order, "q": "" if order == "key" else "a"})
        assert page.status_code == 200 and b"could not be asked" not in page.content
    chosen = [json.dumps([at, None, name]) for name in names]
    assert client.post(URL + "release/", {"lock": chosen}).status_code == 200
    assert client.post(URL + "release/", {"lock": chosen, "confirmed": "1", "reason": "r"}).status_code in (200, 302)
    for name in names[:3]:
        with contextlib.suppress(CommandError):
            call_command("release_lock", name, backend=at)


@pytest.fixture
def client(databases: None) -> Iterator[Client]:
    from django.contrib.admin.models import LogEntry
    from django.contrib.auth.models import User

    client = Client()
    client.force_login(user_with(superuser=True))
    yield client
    LogEntry.objects.all().delete()
    User.objects.all().delete()


SQLITE: dict[str, dict[str, Any]] = {
    "owner is empty": {"owner": ""},
    "owner is bytes": {"owner": b"\xff\xfe"},
    "owner is huge": {"owner": "x" * 100_000},
    "holder is bytes": {"holder": b"\xff\xfe"},
    "name is bytes": {"name": b"\xff\xfe"},
    "name is none of ours": {"name": "DROP TABLE\n\x1b[2J"},
    "name is empty": {"name": ""},
    "renewed is text": {"renewed": "yesterday"},
    "renewed is infinite": {"renewed": float("inf")},
    "acquired is text": {"acquired_at": "yesterday"},
    "acquired is infinite": {"acquired_at": float("inf")},
    "acquired is huge": {"acquired_at": -1e300},
    "expires in the year 9999": {"expires": 253402300799.0},
    "expires is infinite": {"expires": float("inf")},
    "expires is -infinite": {"expires": float("-inf")},
    "expires is text": {"expires": "tomorrow"},
    "expires is bytes": {"expires": b"\x00"},
    "token is text": {"fencing_token": "x"},
    "token is negative": {"fencing_token": -(2**63)},
    "token is a fraction": {"fencing_token": 1.5},
    "token is infinite": {"fencing_token": float("inf")},
    "token is the greatest": {"fencing_token": 2**63 - 1},
    "token is bytes": {"fencing_token": b"\xff"},
    **{f"holder {number}": {"holder": text} for number, text in enumerate(HOLDERS)},
}


def path() -> str:
    return lock_backends["sqlite"].path()  # type: ignore[attr-defined]


def edit(change: dict[str, Any], name: str = NAME) -> None:
    with contextlib.closing(sqlite3.connect(path(), isolation_level=None, timeout=5)) as connection:
        columns = ", ".join(f"{column} = ?" for column in change)
        assert connection.execute(f"UPDATE lock SET {columns} WHERE name = ?", [*change.values(), name]).rowcount == 1


@pytest.fixture
def sqlite_row() -> Iterator[None]:
    yield
    with contextlib.closing(sqlite3.connect(path(), isolation_level=None, timeout=5)) as connection:
        connection.execute("DELETE FROM lock")
        connection.execute("UPDATE floor SET fencing_token = 0")


@pytest.mark.parametrize("what", SQLITE)
def test_a_row_in_the_lock_file(what: str, sqlite_row: None) -> None:
    mine = lock("edited by hand", backend="sqlite")
    assert mine.acquire()
    edit(SQLITE[what])
    everything("sqlite")
    with contextlib.suppress(LockError):
        mine.release()


def test_all_those_rows_in_the_lock_file(sqlite_row: None, client: Client) -> None:
    names = []
    with contextlib.ExitStack() as stack:
        for number, change in enumerate(SQLITE.values()):
            name = stack.enter_context(lock(f"edited {number}", backend="sqlite")).name
            edit(change, name)
            if "name" not in change:
                names.append(name)
        stack.pop_all()
    commands_and_page("sqlite", names, client)


@pytest.mark.parametrize("token", [2**63 - 1, float("inf"), 1e300])
def test_a_token_that_cannot_rise_grants_nothing(token: float, sqlite_row: None) -> None:
    with lock("edited by hand", backend="sqlite"):
        pass
    edit({"fencing_token": token})
    mine = lock("edited by hand", backend="sqlite")
    with pytest.raises(LockError, match="fencing token"):
        mine.acquire()
    assert not mine.held


POSTGRES = {
    "owner is empty": "owner = ''",
    "acquired at minus infinity": "acquired_at = '-infinity'",
    "acquired before Christ": "acquired_at = '4000-01-01 BC'",
    "expires at infinity": "expires_at = 'infinity'",
    "expires at -infinity": "expires_at = '-infinity'",
    "expires in the year 9999": "expires_at = '9999-12-31 23:59:59+00'",
    "expires in the year 290000": "expires_at = '290000-01-01'",
    "token is the greatest": "fencing_token = 9223372036854775807",
    "token is negative": "fencing_token = -9223372036854775808",
    "waited for ever": "waited_until = 'infinity'",
    "name is none of ours": r"name = E'DROP\n\x1b[2J'",
    "name is empty": "name = ''",
}


HOLDER = "holder = %s"
CHANGES = [*((change, []) for change in POSTGRES.values()), *((HOLDER, [text]) for text in HOLDERS)]


@pytest.fixture
def table(postgres: PostgresServer) -> Iterator[PostgresServer]:
    yield postgres
    postgres.query("TRUNCATE angee_jobs_tasklock")


@pytest.mark.parametrize(("change", "values"), CHANGES, ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_a_row_in_the_table(change: str, values: list[str], table: PostgresServer) -> None:
    mine = lock("edited by hand", backend="postgres_table")
    assert mine.acquire()
    table.query(f"UPDATE angee_jobs_tasklock SET {change}", values)
    everything("postgres_table")
    with contextlib.suppress(LockError):
        mine.release()


def test_all_those_rows_in_the_table(table: PostgresServer, client: Client) -> None:
    names = []
    with contextlib.ExitStack() as stack:
        for number, (change, values) in enumerate(CHANGES):
            names.append(stack.enter_context(lock(f"edited {number}", backend="postgres_table")).name)
            table.query(f"UPDATE angee_jobs_tasklock SET {change} WHERE name = %s", [*values, names[-1]])
        stack.pop_all()
    commands_and_page("postgres_table", names, client)
