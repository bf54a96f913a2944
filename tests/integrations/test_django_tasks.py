"""Django's tasks, with `db_worker` processes."""

import json
import os
import signal
import time

import pytest

from angee_jobs.locks import lock, lock_info
from tests.support.aio import is_free, new_key
from tests.support.procs import Child
from tests.support.servers import eventually, missing_packages, require

ENV = {"DJANGO_SETTINGS_MODULE": "tests.support.tasks_settings"}
MODULE = "tests.support.children.dj_tasks"


class Queue:
    """The process that queues tasks, and the workers."""

    def __init__(self):
        self.child = Child("dj_tasks", env=ENV).start()
        self.child.expect("ready")

    def ask(self, *words):
        self.child.send(json.dumps(words))
        return self.child.line()

    def enqueue(self, name, *args):
        return self.ask("enqueue", name, *args)

    def result(self, task_id):
        return json.loads(self.ask("result", task_id))

    def finished(self, task_id, within=15.0):
        def ended():
            result = self.result(task_id)
            return result if result["status"] in ("SUCCESSFUL", "FAILED") else None

        return eventually(ended, within, "the task ends")


@pytest.fixture(scope="module")
def queue(databases):
    require(missing_packages("django_tasks_db"))
    with Child("dj_tasks:migrate", env=ENV) as child:
        child.expect("migrated", timeout=30)
    queue = Queue()
    yield queue
    queue.child.end()


def start_worker():
    worker = Child("dj_tasks:worker", env=ENV).start()
    worker.expect("ready")
    return worker


@pytest.fixture(scope="module")
def worker(queue):
    """For tasks that end by themselves."""
    worker = start_worker()
    yield worker
    worker.end()


@pytest.fixture
def own_worker(queue):
    """One that the test speaks with, and may kill. No other worker may be about."""
    worker = start_worker()
    yield worker
    worker.end()


def make(key, **options):
    return lock(key, backend="sqlite", **({"ttl": 20} | options))


# Before any test that needs a worker for all.


def test_holder_is_the_task(queue, own_worker):
    key = new_key()
    task_id = queue.enqueue("hold", key)
    holder = own_worker.expect("in")
    assert holder == f"{MODULE}.hold[{task_id}]"
    info = lock_info(key, backend="sqlite")
    assert info.holder.task == holder
    assert info.holder.pid == own_worker.pid
    own_worker.send("go")
    assert queue.finished(task_id)["value"] == "done"
    assert is_free(key, "sqlite")


def test_worker_is_killed_in_the_body(queue, own_worker):
    """Scenario 19: another worker gets it within one ttl."""
    key = new_key()
    queue.enqueue("hold_until_killed", key)
    own_worker.expect("in")
    own_worker.sigkill()
    killed = time.monotonic()
    with make(key, timeout=10):
        assert time.monotonic() - killed < 1.5 + 2.5
    second = start_worker()
    try:
        task_id = queue.enqueue("hold", key)
        second.expect("in")
        second.send("go")
        assert queue.finished(task_id)["value"] == "done"
    finally:
        second.end()


def test_worker_shuts_down_in_the_body(queue, own_worker):
    key = new_key()
    task_id = queue.enqueue("hold", key)
    own_worker.expect("in")
    own_worker.signal(signal.SIGTERM)
    own_worker.send("go")
    assert own_worker.wait() == 0
    assert queue.result(task_id)["value"] == "done"
    assert is_free(key, "sqlite")


def test_worker_is_told_twice_to_end(queue, own_worker):
    """The second signal raises SystemExit in the body: the lock is given up at once."""
    key = new_key()
    task_id = queue.enqueue("hold", key)
    own_worker.expect("in")
    own_worker.signal(signal.SIGTERM)
    eventually(lambda: "gracefully" in own_worker.stderr())
    own_worker.signal(signal.SIGTERM)
    own_worker.wait()
    assert is_free(key, "sqlite")
    assert queue.result(task_id)["errors"] == ["builtins.SystemExit"]


@pytest.mark.parametrize("name", ["skip", "askip"])
def test_skipped_is_seen(queue, worker, name):
    """Scenario 40."""
    key = new_key()
    with make(key, note="nightly"):
        result = queue.finished(queue.enqueue(name, key))
    assert result["status"] == "SUCCESSFUL"
    assert result["value"]["refused"] == make(key).name
    assert f"pid {os.getpid()}" in result["value"]["held_by"]
    assert "[nightly]" in result["value"]["held_by"]
    assert queue.finished(queue.enqueue(name, key))["value"] == "done"


def test_failed_is_seen(queue, worker):
    key = new_key()
    with make(key):
        result = queue.finished(queue.enqueue("fail", key))
    assert result["status"] == "FAILED"
    assert result["errors"] == ["angee_jobs.locks.errors.LockNotAcquiredError"]
    assert queue.finished(queue.enqueue("fail", key))["value"] == "done"


@pytest.mark.parametrize(("name", "more", "value"), [("again", [7], "done 7 1"), ("aagain", [], "done")])
def test_queued_again(queue, worker, name, more, value):
    key = new_key()
    with make(key):
        result = queue.finished(queue.enqueue(name, key, *more))
        assert result["status"] == "SUCCESSFUL"
        assert result["value"]["refused"] == make(key).name
        second = queue.finished(result["value"]["queued_again"])
        assert second["value"]["queued_again"] != result["value"]["queued_again"]
    task_id = second["value"]["queued_again"]
    while "queued_again" in (result := queue.finished(task_id))["value"]:  # before the lock was free
        task_id = result["value"]["queued_again"]
    assert result["value"] == value


def test_async_task_names_itself(queue, worker):
    key = f"{new_key()}-holder"
    task_id = queue.enqueue("askip", key)
    assert queue.finished(task_id)["value"] == f"{MODULE}.askip[{task_id}]"


def test_a_task_inside_a_task(queue, worker):
    """Each names its own, and the outer one does so again afterwards."""
    key = new_key()
    task_id = queue.enqueue("outer", key)
    inner, outer = queue.finished(task_id)["value"]
    assert inner.startswith(f"{MODULE}.inner[")
    assert outer == f"{MODULE}.outer[{task_id}]"


def test_called_as_a_function(queue):
    key = new_key()
    assert json.loads(queue.ask("call", "aagain", key)) == "done"
    with make(key):
        assert queue.ask("call", "aagain", key) == "LockNotAcquiredError"


def test_backend_that_cannot_defer(queue):
    key = new_key()
    with make(key):
        assert queue.ask("enqueue", "cannot_defer", key)  # the task has failed, and its process goes on


def test_hand_off(queue, worker):
    key = new_key()
    mine = make(key)
    assert mine.acquire()
    owner = mine.detach(ttl=30)
    first = queue.enqueue("adopt", key, owner)
    assert queue.finished(first)["value"] == f"{MODULE}.adopt[{first}]"
    assert is_free(key, "sqlite")
    second = queue.finished(queue.enqueue("adopt", key, owner))
    assert second["errors"] == ["angee_jobs.locks.errors.LockLostError"]
