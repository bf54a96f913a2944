"""What a project does with the records of the log neither breaks a lock nor keeps it from being renewed."""

import logging
import sys
import threading

import pytest

from angee_jobs.locks import LockNotAcquiredError, force_release, lock
from angee_jobs.locks.log import logger as safe_logger
from angee_jobs.locks.signals import lock_lost
from tests.support.servers import eventually

LOGGER = logging.getLogger("angee_jobs.locks")


@pytest.fixture
def quiet(monkeypatch):
    """Neither pytest's own handler, which raises what a handler raises, nor a traceback for each record."""
    monkeypatch.setattr(LOGGER, "propagate", False)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    level = LOGGER.level
    LOGGER.setLevel(logging.DEBUG)
    yield
    LOGGER.setLevel(level)


def test_a_filter_that_raises_breaks_no_lock(alias, key, quiet):
    lost = threading.Event()

    def hear(**kwargs):
        lost.set()

    def fail(record):
        raise ZeroDivisionError

    lock_lost.connect(hear)
    LOGGER.addFilter(fail)
    try:
        with lock(f"{key}-other", ttl=1.5, backend=alias) as other:
            first = lock(key, ttl=30, backend=alias)
            assert first.acquire()
            assert lock(key, backend=alias).acquire() is False
            with pytest.raises(LockNotAcquiredError), lock(key, backend=alias):
                pass
            assert force_release(key, backend=alias)
            assert lost.wait(20)
            deadline = other.expires_at
            eventually(lambda: other.expires_at != deadline or deadline is None, what="the thread goes on renewing")
            other.check()
    finally:
        LOGGER.removeFilter(fail)
        lock_lost.disconnect(hear)


def test_a_handler_that_hangs_costs_no_lease(key, quiet):
    go_on, hangs, lost = threading.Event(), threading.Event(), []

    class Hangs(logging.Handler):
        def emit(self, record):
            hangs.set()
            go_on.wait(30)

    def hear(**kwargs):
        lost.append(kwargs["key"])

    handler = Hangs()
    LOGGER.addHandler(handler)
    lock_lost.connect(hear)
    try:
        with lock(f"{key}-other", ttl=0.9, backend="local") as other:
            lose = [lock(f"{key}-{number}", ttl=0.1, backend="local") for number in range(2)]
            assert all(each.acquire() for each in lose)
            assert hangs.wait(10)
            eventually(lambda: len(lost) == 2, what="both losses are signalled")
            deadline = other.expires_at
            eventually(lambda: (other.expires_at - deadline).total_seconds() > 1, what="it is renewed meanwhile")
    finally:
        go_on.set()
        LOGGER.removeHandler(handler)
        lock_lost.disconnect(hear)


def test_a_record_of_the_packages_own_threads_says_where_it_was_made(key, caplog):
    mine = lock(key, ttl=0.1, backend="local")
    assert mine.acquire()

    def found():
        return next((each for each in caplog.records if key in each.getMessage()), None)

    record = eventually(found)
    assert (record.filename, record.threadName) == ("renewal.py", "angee-locks-renewal")
    safe_logger.warning("here")
    assert (caplog.records[-1].filename, caplog.records[-1].funcName) == ("test_log.py", sys._getframe().f_code.co_name)
