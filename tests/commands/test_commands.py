"""list_locks, release_lock and reap_locks as an operator runs them."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import DatabaseError
from django.test import modify_settings, override_settings

from angee_jobs.locks import Lock, LockKey, attach_lock, held_locks, lock, lock_backends, lock_info, record_lock_key
from angee_jobs.locks.errors import LockBackendError, LockLostError
from tests.support.commands import LOCKS, configured, execute, is_free, manage
from tests.support.servers import eventually


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    with configured():
        yield
        for info in held_locks():
            call_command("release_lock", info.name, stdout=io.StringIO())


def run(*args: Any, **options: Any) -> str:
    out = io.StringIO()
    call_command(*args, stdout=out, **options)
    return out.getvalue()


def one_line_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


def leave_expired(*keys: str) -> None:
    left = [Lock(key, ttl=0.05) for key in keys]
    assert all(each.acquire() for each in left)
    verbs = lock_backends.verbs("default")
    eventually(lambda: all(verbs.inspect(f"angee:name:{key}", float("inf")) is None for key in keys))


# list_locks


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


# release_lock


def test_release_lock() -> None:
    held = Lock("billing-run", ttl=60)
    assert held.acquire()
    done = manage("release_lock", "billing-run", "--reason", "worker is off")
    assert done.returncode == 0 and "Released angee:name:billing-run, which" in done.stdout, done.stderr
    assert "The holder was not stopped." in done.stdout
    assert is_free("billing-run") and held.release() is False and held.lost
    done = manage("release_lock", "angee:name:billing-run")
    assert done.returncode == 3
    assert "Nobody holds angee:name:billing-run" in one_line_of(done)


def test_release_lock_logs_who_and_why(caplog: pytest.LogCaptureFixture) -> None:
    held = Lock("billing-run", ttl=60)
    assert held.acquire()
    run("release_lock", "billing-run", reason="worker is off")
    assert "worker is off" in caplog.text and "on the command line" in caplog.text
    assert held.owner_id and held.owner_id not in caplog.text
    assert held.lost, "in the same process, the holder is told at once"


@pytest.fixture(name="root")
def operator() -> Iterator[User]:
    user = User.objects.create(username="root")
    yield user
    LogEntry.objects.all().delete()
    user.delete()


def test_release_lock_in_the_name_of_a_user(root: User, caplog: pytest.LogCaptureFixture) -> None:
    held = Lock("billing-run", ttl=60)
    assert held.acquire()
    run("release_lock", "billing-run", reason="worker is off", user="root")
    assert "user: root (" in caplog.text and "on the command line" in caplog.text
    [entry] = LogEntry.objects.all()
    assert (entry.user, entry.object_repr) == (root, "angee:name:billing-run")
    assert str(held.fencing_token) in entry.change_message and entry.change_message.endswith(": worker is off")
    assert held.owner_id and held.owner_id not in str(vars(entry))
    assert not held.release()


def test_release_lock_in_the_name_of_nobody_releases_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with lock("billing-run"):
        assert execute("release_lock", "billing-run", "--user", "nobody") == 2
        assert capsys.readouterr().err == "CommandError: there is no user 'nobody'\n"
        assert not is_free("billing-run")


def test_all_that_ended_with_a_session_is_in_the_log_of_the_admin(root: User, monkeypatch: pytest.MonkeyPatch) -> None:
    with lock("billing-run"), lock("other"), monkeypatch.context() as patched:
        Stuck.install(patched)
        run("release_lock", "billing-run", end_session=4711, user="root")
    assert {entry.object_repr for entry in LogEntry.objects.all()} == {"angee:name:billing-run", "angee:name:other"}


def test_a_log_of_the_admin_that_cannot_be_written(
    root: User, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise DatabaseError("no such table")

    held = Lock("billing-run", ttl=60)
    assert held.acquire()
    monkeypatch.setattr(LogEntry.objects, "create", fail)
    assert execute("release_lock", "billing-run", "--user", "root") == 0, "the lock is free"
    printed = capsys.readouterr()
    assert "Released" in printed.out
    assert printed.err == "The log of the admin could not be written: no such table\n"
    assert not held.release()


def test_without_an_admin_the_user_is_only_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    held = Lock("billing-run", ttl=60)
    assert held.acquire()
    with modify_settings(INSTALLED_APPS={"remove": ["django.contrib.admin"]}):
        run("release_lock", "billing-run", user="somebody")
    assert "user: somebody (" in caplog.text
    assert not held.release()


def test_release_lock_says_where_it_is_held() -> None:
    with pytest.raises(LockLostError), lock("billing-run", backend="local"):
        with pytest.raises(CommandError, match="use --backend local") as error:
            run("release_lock", "billing-run")
        assert error.value.returncode == 3
        assert "Released" in run("release_lock", "billing-run", backend="local")
        assert lock_info("billing-run", backend="local") is None
        with pytest.raises(CommandError, match="Nobody holds"):
            run("release_lock", "billing-run", backend="local")


class Stuck:
    """What PostgresAdvisoryLockBackend says when a process does not give up its lock."""

    ended: list[tuple[str, int]] = []

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        verbs: Any = lock_backends.verbs("default")
        Stuck.ended = []

        def force_release(name: str, deadline: float, fencing_token: int | None = None) -> Any:
            raise LockBackendError("it did not give it up when it was asked")

        def end_session(name: str, session: int, deadline: float) -> bool:
            Stuck.ended.append((name, session))
            return session == 4711

        monkeypatch.setattr(verbs, "force_release", force_release)
        monkeypatch.setattr(verbs, "holds_beside", lambda name, d: (4711, list(verbs.list_held(d))), raising=False)
        monkeypatch.setattr(verbs, "end_session", end_session, raising=False)


def test_release_lock_of_a_process_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    with lock("billing-run"), lock("other"):
        with monkeypatch.context() as patched:
            Stuck.install(patched)
            with pytest.raises(CommandError) as error:
                run("release_lock", "billing-run")
            assert error.value.returncode == 4
            assert "--end-session 4711 ends its database session, and with it: angee:name:other" in str(error.value)
            assert not Stuck.ended
            with pytest.raises(CommandError) as error:
                run("release_lock", "billing-run", end_session=1)
            assert error.value.returncode == 3
            assert "The session 1 does not hold angee:name:billing-run: the session 4711 does" in str(error.value)
            text = run("release_lock", "billing-run", end_session=4711)
            assert "Released angee:name:billing-run" in text and "by ending the database session 4711" in text
            assert "and with it angee:name:other." in text and "The holder was not stopped" not in text
        with pytest.raises(CommandError, match="do not hang on sessions") as error:
            run("release_lock", "billing-run", end_session=1)
        assert error.value.returncode == 2


# reap_locks


def test_reap_locks() -> None:
    run("reap_locks")
    leave_expired("one", "two", "three")
    with lock("live"):
        assert "Would remove 3 expired locks of 'default'" in run("reap_locks", dry_run=True)
        assert "Removed 0 expired locks of 'default'" in run("reap_locks", grace=3600)
        assert "Removed 3 expired locks of 'default'" in run("reap_locks", batch_size=2)
        done = manage("reap_locks", "--backend", "default", "--format", "json")
        assert done.returncode == 0 and done.stderr == ""
        result = json.loads(done.stdout)
        assert result["removed"] == 0 and result["backends"] == {"default": 0}
        assert not is_free("live")


def test_reap_locks_reports_a_backend_that_is_down() -> None:
    run("reap_locks")
    leave_expired("one")
    done = manage("reap_locks", "--format", "json", ANGEE_JOBS_TEST_DOWN="1")
    assert done.returncode == 1
    assert json.loads(done.stdout)["backends"]["default"] == 1, "the others were reaped"
    [line] = done.stderr.splitlines()
    assert "The lock backend 'down' was not reaped" in line


@pytest.mark.timeout(180)
def test_reaping_twice_at_once_counts_each_once() -> None:
    run("reap_locks")
    for _ in range(5):
        keys = [f"run-{number}" for number in range(40)]
        with lock("live"):
            leave_expired(*keys)
            processes = [subprocess.Popen(**_reaper()) for _ in range(2)]
            results = [json.loads(process.communicate(timeout=40)[0]) for process in processes]
            assert [process.returncode for process in processes] == [0, 0]
            assert sum(result["removed"] for result in results) == len(keys)
            assert not is_free("live")


def _reaper() -> dict[str, Any]:
    from tests.support.commands import argv, environment

    args = argv("reap_locks", "--backend", "default", "--format", "json", "--batch-size", "7")
    return {"args": args, "env": environment(), "stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL}


def test_reaping_again_and_again_while_locks_come_and_go() -> None:
    """Each expired hold is counted once, whatever order names come in, and no live one is touched."""
    run("reap_locks")
    left = 0
    for number in range(50):
        leave_expired(f"{number * 37 % 50:02}-over")
        with lock(f"{number:02}-live"):
            left += 1
            if number % 3 == 2:
                assert f"Removed {left} expired" in run("reap_locks", batch_size=2)
                left = 0
            assert not is_free(f"{number:02}-live")


# Wrong usage


@pytest.mark.parametrize(
    "args",
    [
        ("list_locks", "--nonsense"),
        ("list_locks", "--format", "xml"),
        ("list_locks", "--backend", "nowhere"),
        ("release_lock",),
        ("release_lock", "angee:nonsense"),
        ("release_lock", ""),
        ("release_lock", "x", "--backend", "nowhere"),
        ("reap_locks", "--grace", "-1"),
        ("reap_locks", "--batch-size", "0"),
        ("reap_locks", "--backend", "nowhere"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(*args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_a_setting_that_cannot_work_is_one_line() -> None:
    with override_settings(ANGEE_JOBS_LOCKS="nonsense"), pytest.raises(CommandError, match="must be a dictionary"):
        run("list_locks")
    wrong = LOCKS | {"wrong": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "nowhere"}}}
    with override_settings(ANGEE_JOBS_LOCKS=wrong), pytest.raises(CommandError, match="there is no database 'nowhere'"):
        run("reap_locks")


def test_a_detached_hold_is_listed_and_can_be_released() -> None:
    held = Lock("export", ttl=30)
    assert held.acquire()
    owner = held.detach(ttl=30)
    assert "angee:name:export" in run("list_locks") and owner not in run("list_locks")
    run("release_lock", "export")
    with pytest.raises(Exception, match="no detached hold"):
        attach_lock("export", owner)
    assert LockKey("name", ("export",)).name not in run("list_locks")
