"""release_lock as an operator runs it, and what all commands have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.db import DatabaseError
from django.test import modify_settings, override_settings

from angee_jobs.locks import Lock, LockKey, attach_lock, lock, lock_backends, lock_info
from angee_jobs.locks.errors import LockBackendError, LockLostError
from tests.support.commands import LOCKS, configured, execute, is_free, manage, one_line_of, run


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    with configured():
        yield


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
    assert "angee:name:billing-run is not held" in one_line_of(done)


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
        with pytest.raises(CommandError, match="is not held"):
            run("release_lock", "billing-run", backend="local")


class Stuck:
    """What PostgresAdvisoryLockBackend says when a process does not give up its lock."""

    ended: list[tuple[str, int]] = []

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        operations: Any = lock_backends.operations("default")
        Stuck.ended = []

        def force_release(name: str, deadline: float, fencing_token: int | None = None) -> Any:
            raise LockBackendError("it did not give it up when it was asked")

        def end_session(name: str, session: int, deadline: float) -> bool:
            Stuck.ended.append((name, session))
            return session == 4711

        monkeypatch.setattr(operations, "force_release", force_release)
        monkeypatch.setattr(
            operations, "holds_beside", lambda name, d: (4711, list(operations.list_held(d))), raising=False
        )
        monkeypatch.setattr(operations, "end_session", end_session, raising=False)


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
