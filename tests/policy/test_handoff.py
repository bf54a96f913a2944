"""`detach()` and `attach_lock()`: a hold that moves to another process."""

import threading
import time

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from angee_jobs.locks import (
    LockBackendError,
    LockLostError,
    attach_lock,
    force_release,
    lock_backends,
    lock_info,
    reap_expired_locks,
)
from angee_jobs.locks.renewal import renewer
from tests.support.aio import is_free, make, new_key, nothing_left
from tests.support.aio import renewed as it_is_renewed
from tests.support.forks import Forked
from tests.support.servers import eventually


def renewing(key):
    return [hold for hold in renewer.holds if hold.key.parts == (key,) and hold.renews]


def test_from_one_process_to_the_next(leases):
    """A request takes the lock, a worker adopts, renews and releases it."""
    if not lock_backends[leases].cross_process:
        pytest.skip("excludes inside one process only")
    key = new_key()
    request = make(key, leases, ttl=5)
    assert request.acquire()
    token, owner = request.fencing_token, request.detach(ttl=30)
    assert not request.held
    assert not request.lost
    assert not request.release()
    assert not is_free(key, leases)

    def worker():
        with attach_lock(key, owner, ttl=2.25, note="worker", backend=leases) as held:
            for _ in range(2):  # the first may be what the block begins with
                it_is_renewed(held)
            held.check()
            assert held.owner_id != owner
            assert not is_free(key, leases)
            return held.fencing_token

    assert Forked(worker).result() == token
    nothing_left(key, leases)


def test_a_second_delivery_cannot_adopt(leases):
    key = new_key()
    owner = detached(key, leases)
    with attach_lock(key, owner, backend=leases) as held:
        for _ in range(3):
            with pytest.raises(LockLostError, match="ran out, or was attached before"):
                attach_lock(key, owner, backend=leases)
        held.check()
    with pytest.raises(LockLostError):
        attach_lock(key, owner, backend=leases)
    nothing_left(key, leases)


def detached(key, alias, ttl=20, **options):
    mine = make(key, alias, **options)
    assert mine.acquire()
    return mine.detach(ttl=ttl)


def test_many_deliveries_at_once_and_one_of_them_adopts(leases):
    for _ in range(10):
        key = new_key()
        owner = detached(key, leases)
        start = threading.Barrier(6)
        outcomes = []

        def deliver(key=key, owner=owner, start=start, outcomes=outcomes):
            start.wait(10)
            try:
                held = attach_lock(key, owner, backend=leases)
            except LockLostError:
                outcomes.append(None)
            else:
                outcomes.append(held)

        threads = [threading.Thread(target=deliver) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(outcomes) == 6
        [held] = [each for each in outcomes if each is not None]
        assert held.release()
        nothing_left(key, leases)


def test_a_task_that_never_starts(leases):
    key = new_key()
    started = time.monotonic()
    owner = detached(key, leases, ttl=0.6)
    with make(key, leases, timeout=10):
        assert 0.5 < time.monotonic() - started < 6
        with pytest.raises(LockLostError):
            attach_lock(key, owner, backend=leases)
    nothing_left(key, leases)


def test_too_late_for_an_expired_hold_that_nobody_took(leases):
    key = new_key()
    owner = detached(key, leases, ttl=0.2)
    eventually(lambda: lock_info(key, backend=leases) is None)
    with pytest.raises(LockLostError):
        attach_lock(key, owner, backend=leases)
    reap_expired_locks(backend=leases)
    with pytest.raises(LockLostError):
        attach_lock(key, owner, backend=leases)
    nothing_left(key, leases)


def test_nothing_renews_a_detached_hold(leases):
    key = new_key()
    with make(key, leases, ttl=2) as held:
        owner = held.detach(ttl=0.9)  # would be renewed before its end, again and again
        assert not renewing(key)
    started = time.monotonic()
    with make(key, leases, timeout=10):
        assert time.monotonic() - started < 6
    assert owner


def test_detached_for_longer_or_shorter_than_its_lease(leases):
    key = new_key()
    owner = detached(key, leases, ttl=100)
    left = lock_info(key, backend=leases)
    assert 90 < (left.expires_at - left.acquired_at).total_seconds() < 110
    attach_lock(key, owner, backend=leases, ttl=30).release()
    owner = detached(key, leases, ttl=0.3)
    eventually(lambda: is_free(key, leases), 10)
    with pytest.raises(LockLostError):
        attach_lock(key, owner, backend=leases)


def test_leaving_a_block_after_detaching_in_it(leases):
    key = new_key()
    with make(key, leases) as held:
        owner = held.detach()
        with pytest.raises(LockLostError, match="not held here"):
            held.check()
        with pytest.raises(LockLostError):
            held.detach()
    assert not is_free(key, leases)
    attach_lock(key, owner, backend=leases).release()
    nothing_left(key, leases)


def test_detaching_in_a_transaction(leases):
    """The hold leaves the transaction too: its commit frees nothing."""
    key = new_key()
    with transaction.atomic():
        with make(key, leases) as held:
            owner = held.detach()
    assert not is_free(key, leases)
    with transaction.atomic():
        with attach_lock(key, owner, backend=leases) as adopted:
            adopted.check()
        assert not is_free(key, leases)
    nothing_left(key, leases)


def test_detaching_what_is_not_held(leases):
    key = new_key()
    mine = make(key, leases)
    with pytest.raises(LockLostError):
        mine.detach()
    assert mine.acquire()
    assert force_release(key, backend=leases)
    with pytest.raises(LockLostError):
        mine.detach()
    assert mine.lost
    nothing_left(key, leases)


@pytest.mark.parametrize("wrong", [None, ""])
def test_an_owner_id_that_is_none(leases, wrong):
    with pytest.raises((TypeError, ValueError)):
        attach_lock(new_key(), wrong, backend=leases)


def test_the_wrong_key_or_owner(leases):
    key = new_key()
    owner = detached(key, leases)
    for wrong in ((new_key(), owner), (key, owner[:-1]), (key, "' OR 1=1 --")):
        with pytest.raises(LockLostError):
            attach_lock(*wrong, backend=leases)
    attach_lock(key, owner, backend=leases).release()
    nothing_left(key, leases)


def test_an_attached_lock_without_a_block(leases):
    """It is watched but not renewed, as after a bare acquire()."""
    key = new_key()
    held = attach_lock(key, detached(key, leases), ttl=1.5, backend=leases)
    held.check()
    assert not renewing(key)
    assert held.extend(1.6)
    eventually(lambda: held.lost)
    nothing_left(key, leases)


def test_a_dropped_attached_lock(leases):
    key = new_key()
    attach_lock(key, detached(key, leases), backend=leases)
    nothing_left(key, leases)


def test_an_attached_lock_used_again(leases):
    key = new_key()
    mine = attach_lock(key, detached(key, leases), backend=leases)
    with mine:
        first = mine.fencing_token
    with mine:
        assert mine.fencing_token > first
    nothing_left(key, leases)


def test_session_locks_cannot_move(alias):
    if lock_backends.operations(alias).leases:
        pytest.skip("its holds can")
    key = new_key()
    with make(key, alias) as held:
        with pytest.raises(ImproperlyConfigured, match="needs a lease"):
            held.detach()
        held.check()
    with pytest.raises(ImproperlyConfigured, match="needs a lease"):
        attach_lock(key, "00" * 16, backend=alias)
    with pytest.raises(ImproperlyConfigured, match="needs a lease"):
        make(key, alias, hold_at_least=60).acquire()
    nothing_left(key, alias)


@pytest.mark.parametrize("carried_out", [True, False], ids=["answer lost", "not carried out"])
def test_detaching_fails(leases, monkeypatch, carried_out):
    """Whoever owns the lock then is known to nobody, so it is freed."""
    key = new_key()
    mine = make(key, leases)
    assert mine.acquire()
    backend = lock_backends.operations(leases)
    real = backend.adopt

    def adopt(*args):
        if carried_out:
            real(*args)
        raise LockBackendError("on purpose", uncertain=carried_out)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "adopt", adopt)
        with pytest.raises(LockBackendError):
            mine.detach(ttl=3600)
    assert not mine.held
    nothing_left(key, leases)
