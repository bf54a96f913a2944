"""`hold_at_least` and `hold_at_most`."""

import time

import pytest

from angee_jobs.locks import (
    LockLostError,
    LockNotAcquiredError,
    clock,
    force_release,
    lock_backends,
    locked,
)
from tests.support.aio import is_free, make, new_key, nothing_left
from tests.support.forks import Forked
from tests.support.servers import eventually


def test_hold_at_least(leases):
    key = new_key()
    started = time.monotonic()
    with make(key, leases, hold_at_least=0.8):
        pass
    with make(key, leases, timeout=10):
        assert 0.7 < time.monotonic() - started < 6
    with make(key, leases, hold_at_least=30):
        pass
    with pytest.raises(LockNotAcquiredError):
        with make(key, leases):
            pass
    assert force_release(key, backend=leases)
    nothing_left(key, leases)


def test_hold_at_least_when_the_body_took_longer(leases):
    key = new_key()
    with make(key, leases, hold_at_least=0.1):
        time.sleep(0.2)
    nothing_left(key, leases, within=0.5)


def test_hold_at_least_when_the_body_fails(leases):
    """The job has run, even if badly: another host may not run it again."""
    key = new_key()
    with pytest.raises(KeyError):
        with make(key, leases, hold_at_least=30):
            raise KeyError
    assert not is_free(key, leases)
    assert force_release(key, backend=leases)
    nothing_left(key, leases)


def test_a_cron_job_on_hosts_whose_clocks_differ(leases):
    """One starts when the other has long finished its work, but within the minimum time."""
    key = new_key()
    ran = []

    @locked(key, on_refused="skip", hold_at_least=30, backend=leases)
    def job(host):
        ran.append(host)

    for host in range(5):
        job(host)
    assert ran == [0]
    assert force_release(key, backend=leases)


def test_hold_at_least_outlives_the_process(leases):
    if not lock_backends[leases].cross_process:
        pytest.skip("excludes inside one process only")
    key = new_key()

    def job():
        with make(key, leases, hold_at_least=2):
            return "done"

    assert Forked(job).result() == "done"
    assert not is_free(key, leases)
    eventually(lambda: is_free(key, leases), 10)


def test_a_hung_body_loses_its_lock(alias):
    key = new_key()
    started = time.monotonic()
    with pytest.raises(LockLostError):
        with make(key, alias, ttl=2.4, hold_at_most=3) as held:  # longer than it could live without renewal
            eventually(lambda: held.lost, 10)
            assert 2.9 < time.monotonic() - started < 6
            with make(key, alias, timeout=10):
                pass
    nothing_left(key, alias)


def test_hold_at_most_is_shorter_than_the_lease(alias):
    key = new_key()
    started = time.monotonic()
    with pytest.raises(LockLostError):
        with make(key, alias, ttl=60, hold_at_most=0.5) as held:
            eventually(lambda: held.lost)
            with make(key, alias, timeout=10):
                assert 0.4 < time.monotonic() - started < 6
    nothing_left(key, alias)


def test_no_extension_beyond_hold_at_most(leases):
    key = new_key()
    with pytest.raises(LockLostError):
        with make(key, leases, ttl=1.7, hold_at_most=1.8) as held:
            assert held.extend(60)
            eventually(lambda: held.lost, 10)
            eventually(lambda: is_free(key, leases), 10)


@pytest.mark.parametrize("look", [lambda held: held.lost, lambda held: held.held or held.lost, None])
def test_whoever_looks_first_the_lock_is_freed(alias, look):
    """Before the renewal thread does, or nobody until the block is left."""
    key = new_key()
    with pytest.raises(LockLostError):
        with make(key, alias, ttl=60, hold_at_most=30) as held:
            held._hold.latest_end = clock.now()
            if look is not None:
                assert look(held)
                eventually(lambda: is_free(key, alias), 10)
    eventually(lambda: is_free(key, alias), 10)
    nothing_left(key, alias)


def test_body_that_is_done_in_time(alias):
    key = new_key()
    with make(key, alias, hold_at_most=30) as held:
        held.check()
    nothing_left(key, alias)


def test_least_and_most_that_contradict_each_other(alias):
    with pytest.raises(ValueError, match="longer than hold_at_most"):
        make(new_key(), alias, hold_at_least=2, hold_at_most=1)
