"""What the policy above the backends owes to its users, whichever backend it is."""

import asyncio
import contextlib
import threading
import time

import pytest

from angee_jobs.locks import LocalLockBackend, LockBackendError, LockLostError, LockNotAcquiredError, lock, locked
from angee_jobs.locks.clock import now
from angee_jobs.locks.lock import Lock
from angee_jobs.locks.renewal import renewer
from angee_jobs.locks.testing import ContractCase
from tests.support.servers import eventually


@pytest.fixture
def key(request):
    return f"{request.node.name}-{time.monotonic_ns()}"


class Hung(LocalLockBackend):
    """Renews when it is let go, or fails at the deadline."""

    def __init__(self):
        super().__init__()
        self.go_on, self.asked = threading.Event(), 0

    def extend(self, extensions, deadline):
        self.asked += 1
        if not self.go_on.wait(max(0.0, deadline - now())):
            raise LockBackendError("no answer in time")
        return super().extend(extensions, deadline)


def test_s07_a_backend_that_hangs_costs_no_hold_at_another(key):
    hung, well = Hung(), LocalLockBackend()
    with Lock(key, ttl=2.4, backend=well) as kept:
        lost = Lock(key, ttl=2.4, backend=hung)
        with pytest.raises(LockLostError), lost:
            eventually(lambda: lost.lost)
            eventually(lambda: hung.asked, what="it was asked to renew")
            time.sleep(0.5)  # without renewal the other would be over as well
            assert kept.held
            assert not Lock(key, backend=well).acquire()
    hung.go_on.set()


def test_s06_a_backend_that_was_slow_once_has_no_thread_of_its_own_for_ever(key):
    hung = Hung()
    with Lock(key, ttl=4, backend=hung) as held:
        eventually(lambda: hung.asked > 1, what="the renewal is tried again")
        hung.go_on.set()
        time.sleep(1)
        assert held.held
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("angee-locks-renewal") == 1
        eventually(lambda: not any(thread.name == "angee-locks-renewal-slow" for thread in threading.enumerate()))


def test_without_a_thread_of_its_own_a_slow_backend_is_renewed_all_the_same(key, monkeypatch):
    """The system may grant no more threads."""
    start, refused = threading.Thread.start, []

    def refuse(thread):
        if thread.name == "angee-locks-renewal-slow":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    backend = LocalLockBackend()
    renewer._slow.add(backend)
    with Lock(key, ttl=2.4, backend=backend) as held:
        ContractCase.is_renewed(held)
    assert refused
    assert backend not in renewer._busy


class Recovering(LocalLockBackend):
    """Does not answer at first. Later a call takes 0.4 s, and one that is given less fails."""

    def __init__(self):
        super().__init__()
        self.answers_from = now() + 2.8

    def extend(self, extensions, deadline):
        if now() < self.answers_from or deadline - now() < 0.4:
            time.sleep(max(0.0, deadline - now()))
            raise LockBackendError("no answer in time")
        time.sleep(0.4)
        return super().extend(extensions, deadline)


def test_s09_holds_that_cannot_be_saved_do_not_take_the_others_with_them(key):
    """The time for a batch is not what is left to the most pressing hold of it."""
    backend = Recovering()
    holds = [Lock(f"{key}-{number}", ttl=3 if number < 9 else 4, backend=backend) for number in range(12)]
    for each in holds:
        each.__enter__()
        time.sleep(0.15)
    ends = now() + 4.0  # of every lease that is not renewed
    # When the backend answers, the first have 0.2 s left, the last more than 2 s.
    time.sleep(ends + 0.1 - now())
    kept = [each.held for each in holds]
    for each in holds:
        with contextlib.suppress(LockLostError):
            each.__exit__(None, None, None)
    assert all(kept[9:]), kept


def test_s33_a_coroutine_function_is_locked_while_it_is_awaited(key):
    calls = []

    async def both():
        entered, leave = asyncio.Event(), asyncio.Event()

        @locked(key, on_refused="skip", backend="local")
        async def work():
            calls.append(lock(key, backend="local").acquire())
            entered.set()
            await leave.wait()
            calls.append(lock(key, backend="local").acquire())
            return "done"

        assert asyncio.iscoroutinefunction(work)
        first = asyncio.create_task(work())
        await entered.wait()
        second = await work()
        leave.set()
        return await first, second

    assert asyncio.run(both()) == ("done", None)
    assert calls == [False, False]
    assert lock(key, backend="local").acquire()


def test_s33_a_generator_function_is_refused_where_it_is_decorated():
    def numbers():
        yield 1

    async def more_numbers():
        yield 1

    for function in (numbers, more_numbers):
        with pytest.raises(TypeError, match=function.__name__):
            locked("x", backend="local")(function)


@pytest.mark.parametrize("on_refused", ["Skip", "", None, True])
def test_a_bad_on_refused_is_refused_where_it_is_written(on_refused):
    with pytest.raises(ValueError, match=repr(on_refused)):
        locked("x", on_refused=on_refused)


def test_a_bad_fixed_key_is_refused_where_it_is_written():
    for bad, error in (("", ValueError), (None, TypeError), (42, TypeError)):
        with pytest.raises(error):
            locked(bad)


def test_a_bad_key_of_a_call_is_refused_at_the_call():
    @locked(lambda key: key, backend="local")
    def work(key):
        pytest.fail("the body ran")

    for bad, error in (("", ValueError), (None, TypeError), (42, TypeError)):
        with pytest.raises(error):
            work(bad)


def test_unknown_options_are_refused():
    for use in (lambda: lock("x", tll=5), lambda: locked("x", tll=5)):
        with pytest.raises(TypeError, match="tll"):
            use()


def test_an_error_in_the_key_function_is_that_of_the_call():
    @locked(lambda: 1 / 0, backend="local")
    def work():
        pytest.fail("the body ran")

    with pytest.raises(ZeroDivisionError):
        work()


def test_s40_the_error_of_a_refusal_names_the_holder(key):
    with lock(key, note="nightly run", backend="local"):
        with pytest.raises(LockNotAcquiredError) as caught, lock(key, backend="local"):
            pytest.fail("two holders")
    text = str(caught.value)
    assert key in text
    assert "nightly run" in text


def test_no_hold_is_left_with_the_renewal_thread(key):
    before = len(renewer.holds)
    for _ in range(20):
        with lock(key, timeout=5, backend="local"):
            pass
        assert lock(key, backend="local").acquire()  # and is dropped at once
    eventually(lambda: len(renewer.holds) <= before)
