"""ANGEE_JOBS_LOCKS: which backend an alias means, and what is said when it cannot mean any."""

import threading

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import request_finished
from django.db import close_old_connections, connections
from django.test import override_settings

from angee_jobs.locks import (
    LocalLockBackend,
    TableLockBackend,
    force_release,
    get_lock_backend,
    held_locks,
    lock,
    lock_backends,
    lock_info,
    locked,
    reap_expired_locks,
    task_lock,
    task_lock_is_held,
    task_locks_are_cross_process,
)
from angee_jobs.locks.conf import default_configuration
from angee_jobs.locks.testing.contract.base import Background

LOCAL = "angee_jobs.locks.LocalLockBackend"
TABLE = "angee_jobs.locks.TableLockBackend"


class NoVerbs:
    """Not a lock backend."""


class Picky:
    def __init__(self, *, size):
        if size < 1:
            raise ValueError(f"size must be positive: {size}")

    def try_acquire(self, key, *, timeout=None):
        return None

    def is_held(self, key):
        return False


def here(cls):
    return f"{__name__}.{cls.__name__}"


def told(setting, alias="default"):
    """What ImproperlyConfigured says at the first use of `alias`, the same each time."""
    with override_settings(ANGEE_JOBS_LOCKS=setting):
        texts = set()
        for use in (
            lambda: lock_backends[alias],
            lambda: get_lock_backend(alias),
            lambda: lock("x", backend=alias).acquire(),
            lambda: task_lock("x", backend=alias).__enter__(),
            lambda: task_lock_is_held("x", backend=alias),
        ):
            with pytest.raises(ImproperlyConfigured) as caught:
                use()
            texts.add(str(caught.value))
    [text] = texts
    assert "ANGEE_JOBS_LOCKS" in text
    return text


# What cannot be


def test_an_alias_that_is_not_configured():
    text = told({"default": {"BACKEND": LOCAL}, "leases": {"BACKEND": LOCAL}}, "lease")
    assert "'lease'" in text
    assert "'default'" in text
    assert "'leases'" in text


@pytest.mark.parametrize(
    "use",
    [
        lambda: held_locks(backend="nowhere"),
        lambda: lock_info("x", backend="nowhere"),
        lambda: force_release("x", backend="nowhere"),
        lambda: reap_expired_locks(backend="nowhere"),
        lambda: task_locks_are_cross_process(backend="nowhere"),
        locked("x", backend="nowhere")(int),
        lambda: lock_backends[None],
        lambda: lock_backends[["nowhere"]],
    ],
)
def test_every_function_says_the_same_of_an_unknown_alias(use):
    with pytest.raises(ImproperlyConfigured, match=r"no lock backend (\['nowhere'\]|'nowhere'|None)"):
        use()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ([LOCAL], "list"),
        (LOCAL, "str"),
        ({"default": LOCAL}, "BACKEND"),
        ({"default": {}}, "BACKEND"),
        ({"default": {"BACKEND": LocalLockBackend}}, "dotted path"),
        ({"default": {"BACKEND": LOCAL, "LOCATION": "x"}}, "LOCATION"),
        ({"default": {"BACKEND": TABLE, "ttl": 5}}, "ttl"),
        ({"default": {"BACKEND": TABLE, "OPTIONS": ["ttl"]}}, "OPTIONS"),
        ({"default": {"BACKEND": "angee_jobs.locks.NoSuchBackend"}}, "NoSuchBackend"),
        ({"default": {"BACKEND": "no_such_package.Backend"}}, "no_such_package"),
        ({"default": {"BACKEND": "LocalLockBackend"}}, "'LocalLockBackend'"),
        ({"default": {"BACKEND": "angee_jobs.locks.__all__"}}, "not a class"),
        ({"default": {"BACKEND": here(NoVerbs)}}, "try_acquire"),
        ({"default": {"BACKEND": LOCAL, "OPTIONS": {"alias": "default"}}}, "alias"),
        ({"default": {"BACKEND": TABLE, "OPTIONS": {"tll": 5}}}, "tll"),
        ({"default": {"BACKEND": TABLE, "OPTIONS": {"alias": "nowhere"}}}, "'nowhere'"),
        ({"default": {"BACKEND": TABLE, "OPTIONS": {"ttl": 0}}}, "ttl must be positive: 0"),
        ({"default": {"BACKEND": TABLE, "OPTIONS": {"ttl": -1}}}, "-1"),
        ({"default": {"BACKEND": TABLE, "OPTIONS": {"ttl": "30"}}}, "'30'"),
        ({"default": {"BACKEND": TABLE, "OPTIONS": {"ttl": float("nan")}}}, "NaN"),
        ({"default": {"BACKEND": here(Picky)}}, "size"),
        ({"default": {"BACKEND": here(Picky), "OPTIONS": {"size": 0}}}, "size must be positive: 0"),
    ],
)
def test_an_entry_that_cannot_work(setting, says):
    assert says in told(setting)


def test_an_unknown_path_or_option_tells_the_known_ones():
    text = told({"default": {"BACKEND": "angee_jobs.locks.TabelLockBackend"}})
    assert TABLE in text
    assert LOCAL in text
    text = told({"default": {"BACKEND": TABLE, "OPTIONS": {"tll": 5}}})
    assert "alias" in text
    assert "ttl" in text


def test_a_bad_entry_leaves_the_others_working():
    with override_settings(ANGEE_JOBS_LOCKS={"default": {"BACKEND": LOCAL}, "bad": {"BACKEND": "nope"}}):
        assert list(lock_backends) == ["default", "bad"]
        with lock("x"):
            pass
        with pytest.raises(ImproperlyConfigured):
            lock_backends.all()


# The default


def test_without_the_setting_a_sqlite_file_gets_the_lock_table(settings_without_locks):
    assert list(lock_backends) == ["default"]
    assert isinstance(lock_backends["default"], TableLockBackend)


def test_without_the_setting_sqlite_in_memory_gets_the_local_backend(settings_without_locks, monkeypatch):
    monkeypatch.setattr(type(connections["default"]), "is_in_memory_db", lambda self: True)
    assert isinstance(lock_backends["default"], LocalLockBackend)


def test_without_the_setting_postgresql_gets_session_locks(settings_without_locks, monkeypatch):
    monkeypatch.setattr(type(connections["default"]), "vendor", "postgresql")
    assert default_configuration() == {
        "BACKEND": "angee_jobs.locks.PostgresAdvisoryLockBackend",
        "OPTIONS": {"alias": "default"},
    }


def test_without_the_setting_another_server_gets_the_lock_table(settings_without_locks, monkeypatch):
    monkeypatch.setattr(type(connections["default"]), "vendor", "mysql")
    assert default_configuration() == {"BACKEND": TABLE, "OPTIONS": {"alias": "default"}}
    with pytest.raises(ImproperlyConfigured, match="mysql"):
        lock_backends["default"]


@pytest.fixture
def settings_without_locks():
    with override_settings():
        from django.conf import settings

        del settings.ANGEE_JOBS_LOCKS
        lock_backends._setting_changed(setting="ANGEE_JOBS_LOCKS")
        yield
    lock_backends._setting_changed(setting="ANGEE_JOBS_LOCKS")


# One instance per process and alias


def test_all_threads_get_the_same_instance():
    with override_settings(ANGEE_JOBS_LOCKS={"default": {"BACKEND": LOCAL}, "other": {"BACKEND": LOCAL}}):
        start = threading.Barrier(8)

        def look():
            start.wait(10)
            return id(lock_backends["default"]), id(lock_backends["other"])

        seen = {thread.result() for thread in [Background(look) for _ in range(8)]}
        assert seen == {(id(get_lock_backend()), id(get_lock_backend("other")))}
        assert get_lock_backend() is not get_lock_backend("other")
        assert lock_backends.all() == [get_lock_backend(), get_lock_backend("other")]


def test_the_end_of_a_request_closes_nothing():
    before = lock_backends["sqlite"]
    with lock("x", backend="sqlite") as held:
        request_finished.send(sender=None)
        close_old_connections()
        assert lock_backends["sqlite"] is before
        assert held.held
        assert task_lock_is_held("x", backend="sqlite")


def test_overridden_settings_make_new_instances_and_holds_go_on():
    before = lock_backends["sqlite"]
    with lock("x", backend="sqlite", ttl=30) as held:
        with override_settings(ANGEE_JOBS_LOCKS={"sqlite": {"BACKEND": TABLE, "OPTIONS": {"ttl": 7}}}):
            assert lock_backends["sqlite"] is not before
            assert lock_backends["sqlite"].ttl == 7
            assert not lock("x", backend="sqlite").acquire()
            assert held.extend()
            with pytest.raises(ImproperlyConfigured):
                lock_backends["local"]
        assert lock_backends["sqlite"] is not before
        assert held.held
        assert not lock("x", backend="sqlite").acquire()
    assert not task_lock_is_held("x", backend="sqlite")


def test_options_reach_the_backend():
    with override_settings(ANGEE_JOBS_LOCKS={"default": {"BACKEND": TABLE, "OPTIONS": {"ttl": 60}}}):
        with lock("x") as held:
            info = held.info()
            assert 55 < (info.expires_at - info.acquired_at).total_seconds() <= 61
            assert (info.backend, lock_backends["default"].alias) == ("default", "default")
