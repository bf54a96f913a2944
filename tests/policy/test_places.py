"""``slots=`` and ``shared=True`` where they cannot be had: refused, with what to write; nothing excludes less."""

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from angee_jobs.locks import LocalLockBackend, LockBackendError, lock, locked, task_lock
from angee_jobs.locks.backends.base import Extension, extend_each_kind
from angee_jobs.locks.hold import new_owner_id


class Few(LocalLockBackend):
    most_places = 4


class Minimal:
    """A backend of somebody else, with the least that one must have."""

    cross_process = False

    def try_acquire(self, key, *, timeout=None):
        raise AssertionError("asked, although it cannot share a key")

    def is_held(self, key):
        return False


LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"},
    "few": {"BACKEND": f"{__name__}.Few"},
    "minimal": {"BACKEND": f"{__name__}.Minimal"},
}


@pytest.mark.parametrize("options", [{"slots": 2}, {"shared": True}], ids=str)
@pytest.mark.parametrize("form", [lock, task_lock])
def test_a_backend_that_only_excludes_refuses_to_share(form, options):
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS):
        with (
            pytest.raises(ImproperlyConfigured, match="has none"),
            form("a", backend="minimal", **options),
        ):
            pytest.fail("let in")
        with pytest.raises(ImproperlyConfigured), form(["a", "b"], backend="minimal", **options):
            pytest.fail("let in")


def test_a_backend_with_few_places_tells_their_number():
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS):
        with lock("a", backend="few", slots=4) as held:
            assert held.slot == 0
        with pytest.raises(ImproperlyConfigured, match="has at most 4 places"):
            lock("a", backend="few", slots=5).acquire()


def test_a_bad_number_is_an_error_where_it_is_written():
    for slots in (0, -1, 1001, True):
        with pytest.raises(ValueError, match="slots must be between 1 and 1000"):
            locked("a", slots=slots)
    with pytest.raises(TypeError):
        locked("a", slots=2.0)
    with pytest.raises(ValueError, match="cannot have slots= too"):
        locked(lambda: "a", slots=2, shared=True)


@pytest.mark.parametrize("fails", ["alone", "members"])
def test_a_batch_that_fails_for_one_kind_tells_what_was_extended_of_the_other(fails):
    """The holder of a lease that the storage has extended need not fear for it."""
    alone, placed = (Extension("a", new_owner_id(places), 1.0) for places in (0, 3))
    asked = []

    def extend(kind):
        def call(batch):
            asked.append((kind, [each.owner for each in batch]))
            if kind == fails:
                raise LockBackendError("away")
            return [each.owner for each in batch]

        return call

    with pytest.raises(LockBackendError, match="away") as caught:
        extend_each_kind([placed, alone], extend("alone"), extend("members"))
    assert asked == [("alone", [alone.owner]), ("members", [placed.owner])]
    assert list(caught.value.extended) == [placed.owner if fails == "alone" else alone.owner]
    assert extend_each_kind([placed, alone], list_owners, list_owners) == [alone.owner, placed.owner]
    assert extend_each_kind([], extend("alone"), extend("members")) == []


def list_owners(batch):
    return [each.owner for each in batch]
