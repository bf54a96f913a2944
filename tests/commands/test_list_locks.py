"""list_locks as an operator runs it: on a terminal, in a pipe, for a program."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from angee_jobs.locks import LockKey, lock, record_lock_key
from tests.support.commands import LOCKS, argv, configured, environment, execute, leave_expired, manage, run


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    with configured():
        yield


def test_list_locks_is_an_aligned_table() -> None:
    with lock("billing-run", note="by hand"), lock(record_lock_key("shop.Order", 7, "invoice"), backend="local"):
        done = run("list_locks")
    head, *rows = done.splitlines()
    assert head.split() == ["BACKEND", "SINCE", "EXPIRES", "TOKEN", "HOLDER", "KEY"]
    at = head.index("KEY")
    assert [row[at:] for row in rows] == ["angee:name:billing-run", "angee:record:shop.Order:7:invoice"]
    assert "by hand" in rows[0] and rows[1].startswith("local")
    assert run("list_locks") == "", "nothing is held, nothing is printed"


def test_list_locks_as_json_and_without_owner_ids() -> None:
    with lock("billing-run") as held:
        text = run("list_locks", format="json")
        assert str(held.owner_id) not in text + run("list_locks")
    [info] = json.loads(text)
    assert info["name"] == "angee:name:billing-run" and info["backend"] == "default"
    assert info["fencing_token"] == held.fencing_token and info["holder"]["pid"]
    assert info["acquired_at"] < info["expires_at"]
    assert json.loads(run("list_locks", format="json")) == []


def test_list_locks_tells_places() -> None:
    with lock("import", slots=3), lock("import", slots=3), lock("index", shared=True):
        text, infos = run("list_locks"), json.loads(run("list_locks", format="json"))
    for told in ("import (place 1 of 3)", "import (place 2 of 3)", "index (shared)"):
        assert told in text
    told = sorted((info["name"], info["slot"] or 0, info["slots"], info["shared"]) for info in infos)
    one, two = ("angee:name:import", 0, 3, False), ("angee:name:import", 1, 3, False)
    assert told == [one, two, ("angee:name:index", 0, None, True)]


def test_list_locks_by_pattern() -> None:
    with lock("billing-run"), lock("billing-2"), lock(record_lock_key("shop.Order", 7, "invoice")):

        def names(**options: Any) -> list[str]:
            return sorted(info["name"] for info in json.loads(run("list_locks", format="json", **options)))

        assert names(key="billing-*") == ["angee:name:billing-2", "angee:name:billing-run"]
        assert names(key="angee:record:shop.Order:*") == ["angee:record:shop.Order:7:invoice"]
        assert names(key="billing-run") == ["angee:name:billing-run"]
        assert names(key="BILLING-*") == names(key="illing") == names(backend="local") == []


def test_list_locks_stale() -> None:
    run("reap_locks")
    leave_expired("over")
    with lock("live"):
        [row] = json.loads(run("list_locks", stale=True, format="json"))
        assert row["name"] == "angee:name:over"
        assert " s ago" in run("list_locks", stale=True)
    run("reap_locks")
    assert run("list_locks", stale=True) == ""


def test_list_locks_moves_no_cursor() -> None:
    with lock("billing-run", note="\x1b[2J\nangee"):
        text = run("list_locks")
    assert "\x1b" not in text and len(text.splitlines()) == 2


def test_a_backend_that_is_down_fails_after_the_others_were_listed() -> None:
    with lock("billing-run"):
        done = manage("list_locks", ANGEE_JOBS_TEST_DOWN="1")
    assert done.returncode == 1
    assert "angee:name:billing-run" in done.stdout
    [line] = done.stderr.splitlines()
    assert "The lock backend 'down' could not be asked" in line


def test_a_backend_that_cannot_list_does_not_fail_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS | {"third": {"BACKEND": "tests.support.admin_page.TellsNothing"}}):
        with lock("billing-run"):
            assert execute("list_locks") == 0
            printed = capsys.readouterr()
            assert "angee:name:billing-run" in printed.out
            assert printed.err.splitlines() == ["The lock backend 'third' cannot list its locks"]
            assert execute("list_locks", "--backend", "third") == 1, "it was asked for"
            assert "does not tell who holds a lock" in capsys.readouterr().err
        assert execute("reap_locks") == 0, "it has nothing to reap"
        capsys.readouterr()
        assert execute("list_locks", "--stale", "--format", "json") == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out) == [] and len(printed.err.splitlines()) == 1


def test_list_locks_without_time_zones() -> None:
    """With USE_TZ = False, where Django's own now() has no time zone."""
    with override_settings(USE_TZ=False, TIME_ZONE="Europe/Berlin"), lock("billing-run"):
        [_, row] = run("list_locks").splitlines()
        assert " in 30 s " in row or " in 29 s " in row
        [info] = json.loads(run("list_locks", format="json"))
        assert info["acquired_at"].endswith("+00:00")
        leave_expired("over")
        assert " s ago" in run("list_locks", stale=True)
        assert "Removed 1 expired lock " in run("reap_locks")


@pytest.mark.parametrize("locks", [1, 300])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_that_has_seen_enough(locks: int, form: str) -> None:
    """`list_locks | head`: no traceback, while it writes or when it ends."""
    held = [lock(f"{number}-{'x' * 400}") for number in range(locks)]
    assert all(each.acquire() for each in held)
    process = subprocess.Popen(
        argv("list_locks", "--format", form),
        env=environment(PYTHONUNBUFFERED=""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(20) == 141
    assert all(each.release() for each in held)


NASTY = LockKey("file", ("a\u202egpj.exe", "\udc80", "é"))


def test_no_name_does_anything_to_a_terminal() -> None:
    """An override of the direction of writing, half a character, and one that a terminal does not have."""
    with lock(NASTY, note="\u202e\udc80"), lock(NASTY, backend="local", note="\udc80"):
        for form in ("text", "json"):
            text = run("list_locks", format=form)
            assert "\u202e" not in text
            text.encode()
        done = manage("list_locks", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert (done.returncode, done.stderr) == (0, "")
        assert r"a\x202egpj.exe:%ED%B2%80:\xe9" in done.stdout


def test_no_message_does_anything_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = NASTY.name
    assert execute("release_lock", name) == 3
    held = lock(NASTY, ttl=60)
    assert held.acquire()
    assert execute("run_locked", name, "--", "true") == 75
    assert execute("run_locked", "\u202e", "--nonsense\u202e", "--", "true") == 2
    assert execute("release_lock", name) == 0
    assert execute("release_lock", "angee:\u202e") == 2
    printed = capsys.readouterr()
    assert r"Released angee:file:a\x202egpj.exe" in printed.out
    assert re.search(r"angee:file:a\\x202egpj.exe\S* is not held in the backend", printed.err)
    assert "\u202e" not in printed.out + printed.err
    assert not held.release()
