"""`OnceTask`: at most one of a kind is queued or runs."""

import os
import signal
import time
from datetime import UTC, datetime, timedelta

import pytest

from angee_jobs.locks import LockBackendError, lock_backends, lock_info
from tests.support.celery_workers import make, new_key
from tests.support.procs import stopwatch
from tests.support.servers import eventually

TTL = 2.0  # of the tasks that are killed or retried, once they run


@pytest.fixture
def once(celery_queue):
    celery_queue.shared = celery_queue.shared_worker()
    return celery_queue


@pytest.fixture(scope="session")
def prefork(celery_queue):
    """A worker with one child, which a test may kill: the pool makes another one. And its queue."""
    return celery_queue.killable_worker()


def lock_of(queue, task, *args, **kwargs):
    return getattr(queue.tasks, task).lock_key(args, kwargs)


def is_free(key):
    probe = make(key)
    return probe.acquire() and probe.release()


def comes_free(key, within=10.0):
    eventually(lambda: is_free(key), within, "the lock comes free")


def test_queued_then_running_then_done(celery_queue):
    """Refused while it waits in the queue and while it runs; not any more when its result is there."""
    from angee_jobs.integrations.celery import DuplicateTaskError

    key, queue = new_key(), new_key()
    mine = lock_of(celery_queue, "once", key)
    first = celery_queue.send("once", key, queue=queue)
    with pytest.raises(DuplicateTaskError) as raised:
        celery_queue.send("once", key, queue=queue)
    assert raised.value.task_id == first.id
    assert lock_info(mine, backend="sqlite").holder.task == f"tests.support.children.celery_app.once[{first.id}]"
    worker = celery_queue.start_worker(queue=queue)
    try:
        _, pid, task_id = celery_queue.heard(key)
        assert task_id == first.id
        assert lock_info(mine, backend="sqlite").holder.pid == int(pid)
        first_end = lock_info(mine, backend="sqlite").expires_at
        renewed_twice = first_end + timedelta(seconds=1)
        eventually(lambda: lock_info(mine, backend="sqlite").expires_at > renewed_twice, what="it is renewed")
        with pytest.raises(DuplicateTaskError) as raised:
            celery_queue.send("once", key, 2, queue=queue)
        assert raised.value.task_id == first.id
        assert raised.value.holder.holder.pid == int(pid)
        celery_queue.go(key)
        assert first.get(timeout=15) == "done 0"
        assert is_free(mine)
        second = celery_queue.send("once", key, 2, queue=queue)
        celery_queue.heard(key)
        celery_queue.go(key)
        assert second.get(timeout=15) == "done 2"
        assert celery_queue.silent(key)
    finally:
        worker.end()


def test_duplicate_told_by_its_result(once):
    from angee_jobs.integrations.celery import DuplicateResult

    key = new_key()
    first = once.send("once_told", key, queue=once.shared)
    once.heard(key)
    second = once.send("once_told", key, 2, queue=once.shared)
    assert isinstance(second, DuplicateResult)
    assert not isinstance(first, DuplicateResult)
    assert second.id == first.id
    assert second.holder.holder.task.endswith(f"[{first.id}]")
    once.go(key)
    assert second.get(timeout=15) == first.get(timeout=15) == "done 0"


def test_failed(once):
    key = new_key()
    error = once.send("once_fails", key, queue=once.shared).get(timeout=15, propagate=False)
    assert type(error) is ValueError
    assert is_free(lock_of(once, "once_fails", key))


@pytest.mark.parametrize("waits_for", ["its turn", "its countdown"])
def test_revoked_before_it_starts(celery_queue, prefork, waits_for):
    worker, queue = prefork
    key = new_key()
    blocker = celery_queue.send("hold", key, queue=queue)
    celery_queue.heard(key)
    countdown = 3 if waits_for == "its countdown" else 0
    result = celery_queue.send("once", key, queue=queue, countdown=countdown)
    mine = lock_of(celery_queue, "once", key)
    assert not is_free(mine)
    eventually(lambda: f"{result.id}] received" in worker.stderr())
    result.revoke()
    eventually(lambda: f"revoked: {result.id}" in worker.stderr())
    celery_queue.go(key)
    blocker.get(timeout=15)
    comes_free(mine)
    assert result.state == "REVOKED"
    assert celery_queue.silent(key)


def test_expired_before_it_starts(celery_queue):
    """The lock ends with the message, also when no worker looks at it."""
    key, queue = new_key(), new_key()
    mine = lock_of(celery_queue, "once", key)
    for expires in (lambda: 0.6, lambda: datetime.now(UTC) + timedelta(seconds=1.2)):
        elapsed = stopwatch()
        celery_queue.send("once", key, queue=queue, expires=expires())
        comes_free(mine)
        assert elapsed() > 0.9, "it was free at once"


def test_expired_as_a_worker_sees_it(celery_queue):
    key, queue = new_key(), new_key()
    result = celery_queue.send("once", key, queue=queue, expires=0.3)
    time.sleep(0.4)
    worker = celery_queue.start_worker(queue=queue)
    try:
        eventually(lambda: result.state == "REVOKED", 10)
        comes_free(lock_of(celery_queue, "once", key))
    finally:
        worker.end()


def test_revoked_with_terminate(celery_queue, prefork):
    """The process is killed, as a lost worker's: free within one ttl."""
    _, queue = prefork
    key = new_key()
    result = celery_queue.send("once_until_killed", key, queue=queue)
    celery_queue.heard(key)
    result.revoke(terminate=True)
    comes_free(lock_of(celery_queue, "once_until_killed", key))
    second = celery_queue.send("once_until_killed", key, queue=queue)
    celery_queue.heard(key)
    celery_queue.go(key)
    assert second.get(timeout=15) == "done 0"


def test_lost_worker(celery_queue, prefork):
    _, queue = prefork
    key = new_key()
    celery_queue.send("once_until_killed", key, queue=queue)
    _, pid = celery_queue.heard(key)
    mine = lock_of(celery_queue, "once_until_killed", key)
    elapsed = stopwatch()
    os.kill(int(pid), signal.SIGKILL)
    comes_free(mine)
    assert 0.3 < elapsed() < TTL + 2.5


def test_redelivered_after_its_worker_was_lost(celery_queue, prefork):
    """It cannot adopt twice, so it waits for the lock that the dead worker left, and runs."""
    _, queue = prefork
    key = new_key()
    result = celery_queue.send("once_late", key, queue=queue)
    _, pid = celery_queue.heard(key)
    os.kill(int(pid), signal.SIGKILL)
    _, second = celery_queue.heard(key, 20)
    assert second != pid
    celery_queue.go(key)
    assert result.get(timeout=15) == "done"
    assert is_free(lock_of(celery_queue, "once_late", key))


def test_delivered_twice_while_it_runs(celery_queue, once):
    """As after a visibility timeout: the second delivery is dropped, and the first one's result counts."""
    key = new_key()
    sent = {}
    from celery.signals import before_task_publish

    def keep(body, headers, properties, **kwargs):
        sent.update(body=body, headers=dict(headers), properties=dict(properties))

    before_task_publish.connect(keep)
    try:
        result = once.send("once", key, queue=once.shared)
    finally:
        before_task_publish.disconnect(keep)
    once.heard(key)
    with once.app.connection_for_write() as connection:
        producer = connection.Producer(serializer="json")
        producer.publish(sent["body"], routing_key=once.shared, headers=sent["headers"], **sent["properties"])
    # After it has waited in vain for the ttl of a lost worker.
    eventually(lambda: f"[{result.id}] was delivered again" in once.log_of(once.shared), 20)
    assert once.silent(key)
    once.go(key)
    assert result.get(timeout=15) == "done 0"
    assert once.silent(key)


@pytest.mark.parametrize("countdown", [0, 2.5])
def test_retry_keeps_the_lock(once, countdown):
    """Over a countdown longer than the ttl of the run, too."""
    from angee_jobs.integrations.celery import DuplicateTaskError

    key = new_key()
    mine = lock_of(once, "once_retries", key, countdown)
    result = once.send("once_retries", key, countdown, queue=once.shared)
    assert once.heard(key)[1] == "0"
    if countdown:
        eventually(lambda: result.state == "RETRY")
        time.sleep(TTL + 0.3)
        assert not is_free(mine)
        with pytest.raises(DuplicateTaskError) as raised:
            once.send("once_retries", key, countdown, queue=once.shared)
        assert raised.value.task_id == result.id
        once.go(key)
    said = once.heard(key)
    assert said[1:] == ["1", f"tests.support.children.celery_app.once_retries[{result.id}]"]
    assert result.get(timeout=15) == "done"
    assert is_free(mine)


def test_retries_that_have_an_end(once):
    key = new_key()
    result = once.send("once_autoretries", key, queue=once.shared)
    once.heard(key)
    once.heard(key)
    error = result.get(timeout=15, propagate=False)
    assert type(error) is KeyError
    assert is_free(lock_of(once, "once_autoretries", key))


def test_waited_too_long_in_the_queue(celery_queue):
    """Its lock ran out and another one was queued: the late one does not run beside it."""
    key, queue, other = new_key(), new_key(), new_key()
    late = celery_queue.send("once_short", key, queue=queue)
    mine = lock_of(celery_queue, "once_short", key)
    comes_free(mine)
    worker = celery_queue.start_worker("threads", 1, queue=other)
    try:
        rival = celery_queue.send("once_short", key, queue=other)
        celery_queue.heard(key)
        second = celery_queue.start_worker("threads", 1, queue=queue)
        try:
            error = late.get(timeout=15, propagate=False)
            assert type(error).__name__ == "DuplicateTaskError"
        finally:
            second.end()
        celery_queue.go(key)
        assert rival.get(timeout=15) == "done"
    finally:
        worker.end()
    assert celery_queue.silent(key)


def test_waited_too_long_but_nobody_else_came(once):
    key = new_key()
    result = once.send("once_short", key, queue=once.shared, countdown=0)
    once.heard(key)
    once.go(key)
    assert result.get(timeout=15) == "done"


def test_message_that_cannot_be_sent(celery_queue, monkeypatch):
    """Nothing is queued, so nothing is locked."""
    from kombu.exceptions import EncodeError, OperationalError

    key = new_key()
    with pytest.raises(EncodeError):
        celery_queue.tasks.once.apply_async([key], {"number": object()}, queue=new_key())

    def send_task(*args, **kwargs):
        raise OperationalError("no broker")

    monkeypatch.setattr(celery_queue.app, "send_task", send_task)
    with pytest.raises(OperationalError):
        celery_queue.send("once", key, queue=new_key())
    comes_free(lock_of(celery_queue, "once", key))


def test_storage_that_cannot_be_reached(celery_queue, monkeypatch):
    """Never fail open: nobody can tell whether it is a duplicate, so it is not queued."""

    def acquire(*args):
        raise LockBackendError("on purpose")

    key, queue = new_key(), new_key()
    monkeypatch.setattr(lock_backends.operations("sqlite"), "acquire", acquire)
    with pytest.raises(LockBackendError):
        celery_queue.send("once", key, queue=queue)
    assert celery_queue.client.llen(queue) == 0


def test_sent_by_name(once):
    """Without the lock of its own that apply_async would give it, it takes one when it runs."""
    key = new_key()
    first = once.app.send_task("tests.support.children.celery_app.once", [key], queue=once.shared)
    once.heard(key)
    second = once.app.send_task("tests.support.children.celery_app.once", [key], queue=once.shared)
    error = second.get(timeout=15, propagate=False)
    assert type(error).__name__ == "DuplicateTaskError"
    once.go(key)
    assert first.get(timeout=15) == "done 0"


@pytest.fixture
def eager(once):
    once.app.conf.task_always_eager = True
    yield
    once.app.conf.task_always_eager = False


def test_run_eagerly(once, eager):
    key = new_key()
    tasks = once.tasks
    once.go(key)
    assert once.send("once", key, 3, queue="unused").get() == "done 3"
    assert is_free(lock_of(once, "once", key))
    assert tasks.once_retries.delay(key, 0).get() == "done"
    assert tasks.once_fails.delay(key).state == "FAILURE"
    assert is_free(lock_of(once, "once_fails", key))
    with make(lock_of(once, "once", key)):
        with pytest.raises(Exception, match="queued or runs already"):
            once.send("once", key, queue="unused")


def test_called_as_a_function(once):
    key = new_key()
    once.go(key)
    assert once.tasks.once_told(key) == "done 0"
