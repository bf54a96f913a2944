"""Locks in real Celery workers: prefork and threads, killed, revoked, out of time, shut down."""

import os
import signal
import time

import pytest

from angee_jobs.locks import lock_info
from tests.support.celery_workers import is_free, make, new_key
from tests.support.servers import eventually

TTL = 1.5  # of the tasks that are killed


@pytest.fixture(params=["prefork", "threads"])
def queue(celery_queue, request):
    return celery_queue.shared_worker(request.param)


@pytest.fixture(scope="session")
def prefork(celery_queue):
    """A worker with one child, which a test may kill: the pool makes another one. And its queue."""
    return celery_queue.killable_worker()


def test_holder_is_the_task(celery_queue, queue):
    key = new_key()
    result = celery_queue.send("hold", key, queue=queue)
    _, pid, holder = celery_queue.heard(key)
    assert holder == f"tests.support.children.celery_app.hold[{result.id}]"
    info = lock_info(key, backend="sqlite")
    assert info.holder.task == holder
    assert info.holder.pid == int(pid)
    assert not is_free(key)
    celery_queue.go(key)
    assert result.get(timeout=15) == "done"
    assert is_free(key)


def test_only_one_of_many_is_in_the_body(celery_queue, queue):
    key = new_key()
    results = [celery_queue.send("fail", key, queue=queue) for _ in range(20)]
    ends = [result.get(timeout=20, propagate=False) for result in results]
    assert ends.count("done") >= 1
    others = [end for end in ends if end != "done"]
    assert {type(end).__name__ for end in others} <= {"LockNotAcquiredError"}
    assert is_free(key)


def test_skipped_is_seen(celery_queue, queue):
    """Scenario 40."""
    key = new_key()
    with make(key, note="nightly"):
        answer = celery_queue.send("skip", key, queue=queue).get(timeout=15)
    assert answer["refused"] == make(key).name
    assert f"pid {os.getpid()}" in answer["held_by"]
    assert "[nightly]" in answer["held_by"]
    assert celery_queue.send("skip", key, queue=queue).get(timeout=15) == "done"


def test_failed_is_seen(celery_queue, queue):
    key = new_key()
    with make(key):
        result = celery_queue.send("fail", key, queue=queue)
        error = result.get(timeout=15, propagate=False)
    assert result.state == "FAILURE"
    assert type(error).__name__ == "LockNotAcquiredError"


def test_again_later(celery_queue, queue):
    key = new_key()
    with make(key):
        result = celery_queue.send("again", key, queue=queue)
        eventually(lambda: result.state == "RETRY", 15)
    assert result.get(timeout=15) == "done True"


def test_again_later_has_an_end(celery_queue, queue):
    key = new_key()
    with make(key):
        error = celery_queue.send("again_twice", key, queue=queue).get(timeout=15, propagate=False)
    assert type(error).__name__ == "LockNotAcquiredError"


def test_a_task_inside_a_task(celery_queue, queue):
    key = new_key()
    result = celery_queue.send("nested", key, queue=queue)
    assert result.get(timeout=15) == f"tests.support.children.celery_app.nested[{result.id}]"


def test_called_as_a_function(celery_queue):
    key = new_key()
    assert celery_queue.tasks.skip(key) == "done"
    assert celery_queue.tasks.again(key) == "done False"
    with make(key):
        assert celery_queue.tasks.skip(key)["refused"] == make(key).name
        with pytest.raises(Exception, match="is taken"):
            celery_queue.tasks.again(key)


def test_prefork_child_is_killed_in_the_body(celery_queue, prefork):
    """Scenario 19: free within one ttl, and the pool's next child takes locks."""
    worker, queue = prefork
    key = new_key()
    lost = celery_queue.send("hold_until_killed", key, queue=queue)
    _, pid, _ = celery_queue.heard(key)
    assert int(pid) != worker.pid
    os.kill(int(pid), signal.SIGKILL)
    killed = time.monotonic()
    with make(key, timeout=10):
        assert time.monotonic() - killed < TTL + 2.5
    error = lost.get(timeout=15, propagate=False)
    assert type(error).__name__ == "WorkerLostError"
    second = celery_queue.send("hold", key, queue=queue)
    celery_queue.heard(key)
    celery_queue.go(key)
    assert second.get(timeout=15) == "done"


def test_redelivered_after_the_child_was_lost(celery_queue, prefork):
    """`acks_late`: the message comes again, and waits for the lock of the one that died."""
    _, queue = prefork
    key = new_key()
    result = celery_queue.send("hold_late", key, queue=queue)
    _, pid = celery_queue.heard(key)
    os.kill(int(pid), signal.SIGKILL)
    _, second = celery_queue.heard(key, 20)
    assert second != pid
    celery_queue.go(key)
    assert result.get(timeout=15) == "done"


def test_revoked_with_terminate(celery_queue, prefork):
    _, queue = prefork
    key = new_key()
    result = celery_queue.send("hold_until_killed", key, queue=queue)
    celery_queue.heard(key)
    result.revoke(terminate=True)
    with make(key, timeout=10):
        pass
    error = result.get(timeout=15, propagate=False)
    assert type(error).__name__ == "TaskRevokedError"


def test_soft_time_limit(celery_queue, prefork):
    """Scenario 44: an exception of a signal handler, in the middle of whatever the body does."""
    _, queue = prefork
    key = new_key()
    result = celery_queue.send("limited", key, queue=queue)
    celery_queue.heard(key)
    assert celery_queue.heard(key) == ["struck"]
    error = result.get(timeout=15, propagate=False)
    assert type(error).__name__ == "SoftTimeLimitExceeded"
    assert is_free(key)


def test_hard_time_limit(celery_queue, prefork):
    _, queue = prefork
    key = new_key()
    result = celery_queue.send("killed", key, queue=queue)
    celery_queue.heard(key)
    error = result.get(timeout=15, propagate=False)
    assert type(error).__name__ == "TimeLimitExceeded"
    with make(key, timeout=TTL + 1.0):
        pass


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_warm_shutdown_in_the_body(celery_queue, pool):
    name, key = new_key(), new_key()
    worker = celery_queue.start_worker(pool, 2, queue=name)
    try:
        result = celery_queue.send("hold", key, queue=name)
        celery_queue.heard(key)
        worker.signal(signal.SIGTERM)
        while "Warm shutdown" not in worker.line():
            pass
        assert not is_free(key)
        celery_queue.go(key)
        assert worker.wait(15) == 0
        assert result.get(timeout=15) == "done"
        assert is_free(key)
    finally:
        worker.end()


def test_cold_shutdown_in_the_body(celery_queue):
    name, key = new_key(), new_key()
    worker = celery_queue.start_worker("prefork", 1, queue=name)
    try:
        celery_queue.send("hold_until_killed", key, queue=name)
        celery_queue.heard(key)
        worker.signal(signal.SIGQUIT)
        worker.wait(15)
        with make(key, timeout=TTL + 1.0):
            pass
    finally:
        worker.end()
