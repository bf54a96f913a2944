"""`OnceTask` where it is called: its keys, the end of a transaction, locks that cannot do it."""

import enum
import logging
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test import override_settings
from django.utils.translation import gettext_lazy

from angee_jobs.integrations.arguments import canonical
from angee_jobs.locks import LocalLockBackend, LockBackendError, lock_backends
from tests.support.celery_workers import is_free, make, new_key


class SessionLocks(LocalLockBackend):
    """As far as OnceTask can see."""

    leases = False


@pytest.fixture
def once(celery_queue):
    celery_queue.shared = celery_queue.shared_worker()
    return celery_queue


# Keys


def test_key_of_chosen_arguments(once):
    """However they are given; the others do not count."""
    key = new_key()
    tasks = once.tasks
    assert tasks.once.lock_key([key], {}) == tasks.once.lock_key([], {"key": key}) == tasks.once.lock_key([key, 5], {})
    assert tasks.once.lock_key([key], {}) != tasks.once.lock_key([f"{key}x"], {})
    assert tasks.once_fails.lock_key([1], {}) != tasks.once_fails.lock_key(["1"], {})
    assert tasks.once.lock_key([key], {}) != tasks.once_told.lock_key([key], {})
    with pytest.raises(ImproperlyConfigured, match="nobody"):
        tasks.once_on_what_is_not_there.lock_key([key], {})
    with pytest.raises(TypeError):
        tasks.once.delay()


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "what_to_pass"),
    [
        ({"a", "b"}, "pass a sorted list"),
        (frozenset("ab"), "pass a sorted list"),
        ({"inside": [{1}]}, "pass a sorted list"),
        (User(pk=7, username="ann"), "pass the primary key"),
        (object(), "pass a str, a number"),
        (Path("a"), "pass a str"),
        (Colour.RED, "pass a str"),
        (gettext_lazy("a"), "pass a str"),
        ({(1, 2): 3}, "must be str or int"),
        (Decimal("1E+2000"), "no one spelling"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_argument_without_a_canonical_form(celery_queue, value, what_to_pass):
    """Refused where the task is called, before anything is locked or sent; other arguments may be what they like."""
    key, queue = new_key(), new_key()
    task = celery_queue.tasks.once_fails
    refused = f"'key' of {task.name} cannot tell.*{what_to_pass}.*unique_on.*lock_key"
    with pytest.raises(TypeError, match=refused):
        task.delay(value)
    with transaction.atomic(), pytest.raises(TypeError, match=refused):
        task.delay_on_commit(value)  # here, and not at the commit
    assert celery_queue.client.llen(queue) == 0
    assert celery_queue.tasks.once.lock_key([key, value], {}) == celery_queue.tasks.once.lock_key([key], {})


def test_equal_arguments_are_spelled_alike():
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    alike = [
        (noon, noon.astimezone(timezone(timedelta(hours=2)))),
        (Decimal("1.50"), Decimal("1.5")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        ({1: "a"}, {"1": "a"}),
    ]
    assert all(canonical(one) == canonical(other) for one, other in alike)
    different = [1, "1", True, 1.5, None, "None", [], {}, "", [[]], date(2026, 1, 1), noon, UUID(int=1), b"1", "\udc80"]
    assert len(set(map(canonical, different))) == len(different)


def test_keys_are_alike_in_all_processes():
    """Golden values, and another order of hashes."""
    value = {"b": [1.5, "ä", None], "a": (datetime(2026, 1, 1, tzinfo=UTC), UUID(int=1), b"\xff", Decimal("1.10"))}
    golden = (
        '{"a": ["2026-01-01T00:00:00+00:00", "00000000-0000-0000-0000-000000000001", "ff", "1.1"], '
        '"b": [1.5, "\\u00e4", null]}'
    )
    assert canonical(value) == golden


def test_models_that_celery_sends_as_dicts(celery_queue, monkeypatch):
    """With `pydantic=True` the caller passes a model and its worker gets a dict: both find one key."""

    class Report:
        number = 7

    def dump(args, kwargs):
        return tuple({"number": arg.number} if isinstance(arg, Report) else arg for arg in args), kwargs

    task = celery_queue.tasks.once_fails
    monkeypatch.setattr(task, "_dump_pydantic_arguments", dump, raising=False)
    assert task.lock_key([Report()], {}) == task.lock_key([{"number": 7}], {})


# At the end of a transaction


@pytest.mark.parametrize("name", ["once", "once_told"])
def test_duplicate_at_the_commit(once, name, caplog):
    """It is no error of the transaction, and the callbacks after it run."""
    caplog.set_level(logging.INFO, "angee_jobs.integrations")
    key, called = new_key(), []
    task = getattr(once.tasks, name)
    with make(task.lock_key([key], {})), transaction.atomic():
        transaction.on_commit(lambda: called.append("before"))
        task.delay_on_commit(key)
        task.apply_async_on_commit([key], {"number": 2}, queue=once.shared)
        transaction.on_commit(lambda: called.append("after"))
    assert called == ["before", "after"]
    assert caplog.text.count("is a duplicate and is not queued") == 2
    assert once.silent(key)


def test_queued_at_the_commit(once):
    key = new_key()
    task = once.tasks.once
    with transaction.atomic():
        task.apply_async_on_commit([key, 3], queue=once.shared)
        assert is_free(task.lock_key([key], {})), "not before the commit"
    _, _, task_id = once.heard(key)
    once.go(key)
    assert once.app.AsyncResult(task_id).get(timeout=15) == "done 3"


def test_locks_that_cannot_be_asked_at_the_commit(once, monkeypatch):
    """As a broker that cannot be reached: the caller is told, and nothing is queued."""

    def acquire(*args):
        raise LockBackendError("on purpose")

    key = new_key()
    monkeypatch.setattr(lock_backends.operations("sqlite"), "acquire", acquire)
    with pytest.raises(LockBackendError), transaction.atomic():
        once.tasks.once.apply_async_on_commit([key], queue=once.shared)
    assert once.silent(key)


# Locks that cannot do it


def test_locks_that_cannot_do_it(celery_queue):
    locks = settings.ANGEE_JOBS_LOCKS | {"session": {"BACKEND": f"{__name__}.SessionLocks"}}
    with override_settings(ANGEE_JOBS_LOCKS=locks):
        with pytest.raises(ImproperlyConfigured, match=r"needs a lease.* Set its lock_backend= to an alias"):
            celery_queue.tasks.once_on_a_session_lock.delay("key")
    with pytest.raises(ImproperlyConfigured, match="local to this process"):
        celery_queue.tasks.once_on_a_local_lock.delay("key")
