"""``LocalLockBackend`` used directly, as code written for ``angee.jobs.locks`` does; see docs/howto/moving.md."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from angee_jobs.locks import LocalLockBackend, LockKey, record_lock_key

KEY = record_lock_key("messaging.Channel", 42, "sync")


@pytest.mark.parametrize("key", [KEY, LockKey("decisions", ("expire",)), "billing-run"])
def test_release_of_a_key_ends_its_hold_whoever_owns_it(key):
    backend = LocalLockBackend()
    handle = backend.try_acquire(key)
    assert handle is not None
    assert backend.release(key) is True
    assert not backend.is_held(key)
    assert backend.release(key) is False
    second = backend.try_acquire(key)
    assert second is not None
    assert handle.release() is False  # late: the next hold is left alone
    assert backend.is_held(key)
    assert second.release() is True


def test_release_of_a_key_leaves_other_keys_and_other_instances_alone():
    backend, other = LocalLockBackend(), LocalLockBackend()
    held = [backend.try_acquire("invoices"), other.try_acquire(KEY)]
    assert all(held)
    assert backend.release(KEY) is False
    assert backend.is_held("invoices")
    assert other.is_held(KEY)
    for handle in held:
        assert handle.release() is True


def test_release_of_a_key_lets_a_waiter_in():
    class Backend(LocalLockBackend):
        waited = threading.Event()

        def remaining(self, name, deadline, places):  # what a waiter asks before it sleeps
            self.waited.set()
            return super().remaining(name, deadline, places)

    backend = Backend()
    first = backend.try_acquire(KEY)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(backend.try_acquire, KEY, timeout=timedelta(seconds=20))
        assert backend.waited.wait(10)
        assert backend.release(KEY) is True
        second = waiter.result(15)
    assert second is not None
    assert first.release() is False
    assert second.release() is True


def test_release_with_an_owner_is_that_owners():
    backend = LocalLockBackend()
    handle = backend.try_acquire(KEY)
    assert backend.release(KEY.name, "a stranger") is False
    assert backend.release(KEY.name, handle.owner_id) is True
