"""The "NAMESPACE" of an alias: tenants, environments and projects on one storage."""

import io

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.test import override_settings

from angee_jobs.locks import (
    LockKey,
    LockLostError,
    attach_lock,
    force_release,
    held_locks,
    lock,
    lock_info,
    record_lock_key,
    task_lock,
    task_lock_is_held,
)

current = ["acme"]


def tenant():
    return current[0]


def no_text():
    return 7


TABLE = {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "other"}}
LOCKS = {
    "default": TABLE,
    "staging": TABLE | {"NAMESPACE": "staging"},
    "tenants": TABLE | {"NAMESPACE": f"{__name__}.tenant"},
    "bad": TABLE | {"NAMESPACE": f"{__name__}.no_text"},
}
KEY = record_lock_key("shop.Order", 1, "invoice")


@pytest.fixture(autouse=True)
def settings():
    current[:] = ["acme"]
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS):
        yield


def test_two_tenants_do_not_share_a_lock():
    """Seen: record 1 of one tenant kept all the others from their own record 1."""
    with lock(KEY, backend="tenants") as acme:
        assert not lock(KEY, backend="tenants").acquire()
        current[:] = ["globex"]
        with lock(KEY, backend="tenants") as globex:
            assert {acme.name, globex.name} == {
                "angee@acme:record:shop.Order:1:invoice",
                "angee@globex:record:shop.Order:1:invoice",
            }
            assert acme.held
            assert globex.held
            assert {acme.name, globex.name} <= {info.name for info in held_locks(backend="default")}


def test_a_lock_object_has_the_namespace_of_each_use():
    """A module's lock is made once, and used by every tenant."""
    shared = lock(KEY, backend="tenants")
    assert shared.acquire()
    current[:] = ["globex"]
    assert not task_lock_is_held(KEY, backend="tenants")
    with task_lock(KEY, backend="tenants") as acquired:
        assert acquired
    assert shared.release(), "the hold keeps the name that it was taken under"


def test_a_namespace_stands_apart_from_none():
    with lock(KEY, backend="staging"), lock(KEY, backend="default"):
        assert lock_info(KEY, backend="staging").name == f"angee@staging:{KEY.name.removeprefix('angee:')}"
        assert lock_info(KEY, backend="default").name == KEY.name


def test_a_name_as_lists_show_it_is_that_lock_whatever_the_tenant():
    with pytest.raises(LockLostError), lock(KEY, backend="tenants") as held:
        current[:] = ["globex"]
        shown = LockKey.parse(held.name)
        assert shown.scope == "acme"
        assert LockKey.parse(shown.name) == shown != KEY
        assert task_lock_is_held(shown, backend="tenants")
        output = io.StringIO()
        call_command("list_locks", "--backend", "tenants", "--format", "json", stdout=output)
        assert held.name in output.getvalue()
        assert force_release(shown, backend="tenants")
        assert not task_lock_is_held(shown, backend="tenants")


def test_names_with_and_without_a_namespace_never_meet():
    odd = ["a", "a:b", "a%b", "@", "angee"]
    keys = [LockKey("n", (part,), scope) for part in odd for scope in ["", *odd]]
    assert len({key.name for key in keys}) == len(keys)
    assert [LockKey.parse(key.name) for key in keys] == keys


def test_a_hold_is_handed_over_within_its_namespace():
    held = lock(KEY, backend="tenants")
    assert held.acquire()
    owner_id = held.detach(ttl=20)
    with attach_lock(KEY, owner_id, backend="tenants") as mine:
        assert mine.name.startswith("angee@acme:")


@pytest.mark.parametrize(
    ("namespace", "says"),
    [(7, "must be a string"), ("nowhere.at_all", "cannot be imported"), ("os.sep", "not callable")],
)
def test_a_namespace_that_cannot_be(namespace, says):
    with override_settings(ANGEE_JOBS_LOCKS={"default": TABLE | {"NAMESPACE": namespace}}):
        with pytest.raises(ImproperlyConfigured, match=says):
            lock("x").acquire()


def test_a_callable_that_returns_no_text_is_told():
    with pytest.raises(ImproperlyConfigured, match="returned 7"):
        lock(KEY, backend="bad").acquire()
