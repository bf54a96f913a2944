"""The system checks: each finds what it is for, says what to write instead, and is quiet otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core import checks
from django.db import connections
from django.test import override_settings

from angee_jobs import checks as ours
from angee_jobs.locks import LockBackend
from tests.support.commands import manage

TABLE = "angee_jobs.locks.TableLockBackend"
LOCAL = "angee_jobs.locks.LocalLockBackend"


class ThirdParty:
    cross_process = False

    def try_acquire(self, key: Any, *, timeout: Any = None) -> Any:
        return None

    def is_held(self, key: Any) -> bool:
        return False


class ThirdPartyAcross(ThirdParty):
    cross_process = True


def found(entry: Any = None, **others: Any) -> list[checks.CheckMessage]:
    """What the checks say of one default backend."""
    locks = others.pop("ANGEE_JOBS_LOCKS", {"default": entry})
    with override_settings(ANGEE_JOBS_LOCKS=locks, **others):
        return ours.check_lock_backends()


def ids(*args: Any, **others: Any) -> list[str]:
    messages = found(*args, **others)
    assert all(message.hint for message in messages), "each says what to write"
    return [str(message.id).removeprefix("angee_jobs.") for message in messages]


def table(**options: Any) -> dict[str, Any]:
    return {"BACKEND": TABLE, "OPTIONS": options}


def test_a_good_setting_is_quiet() -> None:
    assert ids(table(alias="default", ttl=30)) == []
    assert ids(table(ttl=3)) == ids(table(ttl=3600)) == []


@pytest.mark.parametrize(
    "entry",
    [
        {"BACKEND": "angee_jobs.locks.NoSuchBackend"},
        {"BACKEND": TABLE, "OPTIONS": {"tll": 30}},
        {"BACKEND": TABLE, "OPTIONS": {"ttl": 0}},
        {"BACKEND": TABLE, "OPTIONS": {"ttl": float("nan")}},
        {"BACKEND": TABLE, "OPTIONS": {"alias": "nowhere"}},
        {"BACKEND": TABLE, "OPTION": {}},
        {"BACKEND": "builtins.dict"},
        {"BACKEND": 7},
        "nonsense",
    ],
)
def test_an_entry_that_cannot_work(entry: Any) -> None:
    [message] = found(entry)
    assert message.id == "angee_jobs.E001"
    assert message.is_serious()


def test_an_engine_that_is_not_supported() -> None:
    connection = connections["default"]
    vendor = type(connection).vendor
    try:
        type(connection).vendor = "oracle"
        [message] = found(table())
    finally:
        type(connection).vendor = vendor
    assert message.id == "angee_jobs.E001"
    assert "oracle" in message.msg + str(message.hint)


def test_there_has_to_be_a_default() -> None:
    assert ids(ANGEE_JOBS_LOCKS={"leases": table()}) == ["E002"]
    assert ids(ANGEE_JOBS_LOCKS="nonsense") == ["E001"]


def test_local_locks_where_there_are_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ids({"BACKEND": LOCAL}) == [], "a test run is one process"
    monkeypatch.setattr(ours, "in_test_run", lambda: False)
    assert ids({"BACKEND": LOCAL}) == ["W002"]
    assert ids({"BACKEND": LOCAL}, DEBUG=True) == []
    assert ids({"BACKEND": "tests.policy.test_checks.ThirdParty"}) == ["W002"]
    assert ids({"BACKEND": "tests.policy.test_checks.ThirdPartyAcross"}) == []
    assert isinstance(ThirdParty(), LockBackend)


@pytest.mark.parametrize("ttl", [0.5, 2.9, 3601, 86400])
def test_a_ttl_out_of_proportion(ttl: float) -> None:
    assert ids(table(ttl=ttl)) == ["W003"]


def test_a_backend_on_a_mirror() -> None:
    databases = settings.DATABASES | {"other": settings.DATABASES["other"] | {"TEST": {"MIRROR": "default"}}}
    locks = {"default": table(alias="other")}
    original = settings.DATABASES
    try:
        settings.DATABASES = databases
        assert ids(ANGEE_JOBS_LOCKS=locks) == ["W004"]
    finally:
        settings.DATABASES = original


@pytest.mark.parametrize("name", ["ANGEE_JOBS_LOCK", "ANGEE_JOB_LOCKS", "ANGEEJOBS_LOCKS", "ANGEE_JOBS_LOCKING"])
def test_a_misspelt_name_of_the_setting(name: str) -> None:
    with override_settings(**{name: {"default": table()}}):
        assert ours.check_setting_name() == [], "the right one is there, too"
        del settings.ANGEE_JOBS_LOCKS
        [message] = ours.check_setting_name()
    assert message.id == "angee_jobs.W005"
    assert name in message.msg and "ANGEE_JOBS_LOCKS" in str(message.hint)


def test_settings_of_other_apps_are_no_misspellings() -> None:
    with override_settings(ANGEE_JOBS_TASKS={}, ANGEE_JOBS_LOCK=True, JOBS_LOCKS={}):
        del settings.ANGEE_JOBS_LOCKS
        assert ours.check_setting_name() == []


def test_without_psycopg_3_the_hint_is_what_can_work_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was to use the lock table, which needs psycopg 3 as well."""
    pytest.importorskip("psycopg")
    pytest.importorskip("django.db.backends.postgresql.base")  # before it looks for psycopg2
    monkeypatch.setattr("django.db.backends.postgresql.psycopg_any.is_psycopg3", False)
    for path in (TABLE, "angee_jobs.locks.PostgresAdvisoryLockBackend"):
        [message] = found({"BACKEND": path, "OPTIONS": {"alias": "postgres"}})
        assert message.id == "angee_jobs.E001"
        assert "psycopg2" in message.msg
        assert "pip install 'angee-jobs[postgres]'" in str(message.hint)
        assert "RedisLockBackend" in str(message.hint)
        assert "TableLockBackend" not in str(message.hint)


def test_the_checks_are_registered() -> None:
    done = manage("check")
    assert done.returncode == 0
    assert "angee_jobs.W002" in done.stderr, "the settings of the commands have a local backend, and no DEBUG"
    assert "HINT" in done.stderr


def test_one_table_has_them_all() -> None:
    """What the documentation lists is what the code can say, and the other way round."""
    package = Path(ours.__file__).parent
    sources = "".join(path.read_text() for path in package.rglob("*.py") if path != Path(ours.__file__))
    own = Path(ours.__file__).read_text().split('"""', 2)[2]
    raised = set(re.findall(r"angee_jobs\.([EW]\d{3})", sources + own))
    page = package.parent / "docs" / "operations.md"
    described = set(re.findall(r"angee_jobs\.([EW]\d{3})", ours.__doc__ or ""))
    documented = set(re.findall(r"\| `angee_jobs\.([EW]\d{3})`", page.read_text()))
    assert raised == described == documented
