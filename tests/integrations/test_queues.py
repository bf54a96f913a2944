"""The recipes for RQ, Dramatiq and Huey, with their real workers."""

import importlib
import os
import signal
import time

import pytest
from django.conf import settings

from angee_jobs.locks import lock_info
from tests.support.celery_workers import is_free, make, new_key
from tests.support.procs import Child
from tests.support.servers import ValkeyServer, eventually, missing_packages, require


@pytest.fixture(scope="module")
def broker(databases):
    require(ValkeyServer.unavailable())
    with ValkeyServer(settings.TEST_DIR / "queues") as server:
        before = os.environ.get("ANGEE_JOBS_TEST_BROKER")
        os.environ["ANGEE_JOBS_TEST_BROKER"] = str(server.socket_path)
        with server.connect(decode_responses=True, socket_timeout=60) as client:
            yield client
        if before is not None:
            os.environ["ANGEE_JOBS_TEST_BROKER"] = before


@pytest.fixture
def heard(broker):
    def next_words(key, within=20.0):
        said = broker.blpop([f"said:{key}"], timeout=within)
        assert said, f"no task said anything about {key} within {within:g} s"
        return said[1].split()

    return next_words


def app(name, package):
    require(missing_packages(package))
    return importlib.import_module(f"tests.support.children.{name}")


# RQ


@pytest.fixture(params=["fork", "simple"])
def rq(broker, request):
    module = app("rq_app", "rq")
    name = new_key()
    with Child("rq_app:worker", request.param, name) as worker:
        yield module, module.queue(name), worker, request.param


def ended(job, within=20.0):
    eventually(lambda: job.get_status(refresh=True) in ("finished", "failed"), within, "the job ends")
    return job.return_value() if job.get_status() == "finished" else job.latest_result().exc_string


def test_rq(rq, broker, heard):
    module, queue, worker, kind = rq
    key = new_key()
    job = queue.enqueue(module.hold, key)
    _, pid, holder = heard(key)
    assert holder == f"tests.support.children.rq_app.hold[{job.id}]"
    assert (int(pid) == worker.pid) is (kind == "simple")  # RQ forks for each job
    assert lock_info(key, backend="sqlite").holder.pid == int(pid)
    broker.rpush(f"go:{key}", "go")
    assert ended(job) == "done"
    with make(key):
        assert ended(queue.enqueue(module.skip, key)) is None
        assert "LockNotAcquiredError" in ended(queue.enqueue(module.fail, key))
    assert ended(queue.enqueue(module.fail, key)) == "done"
    if kind == "fork":
        queue.enqueue(module.hold_until_killed, key)
        _, pid = heard(key)
        os.kill(int(pid), signal.SIGKILL)
        killed = time.monotonic()
        with make(key, timeout=10):
            assert time.monotonic() - killed < 1.5 + 2.5
        assert ended(queue.enqueue(module.fail, key)) == "done"


# Dramatiq


def test_dramatiq(broker, heard):
    module = app("dramatiq_app", "dramatiq")
    key, other = new_key(), new_key()
    with Child("dramatiq_app:worker") as worker:
        message = module.hold.send(key)
        _, pid, holder = heard(key, 30)
        assert holder == f"hold[{message.message_id}]"
        assert int(pid) != worker.pid
        assert not is_free(key)
        broker.rpush(f"go:{key}", "go")
        assert heard(key) == ["done"]
        with make(other):
            module.again.send(other)
            assert heard(other) == ["refused"]
        while (said := heard(other)) == ["refused"]:
            pass
        assert said == ["done"]
        eventually(lambda: is_free(key))
        module.hold_until_killed.send(key)
        _, pid = heard(key)
        os.kill(int(pid), signal.SIGKILL)
        killed = time.monotonic()
        with make(key, timeout=10):
            assert time.monotonic() - killed < 1.5 + 2.5


# Huey


def test_huey(broker, heard):
    module = app("huey_app", "huey")
    key, other = new_key(), new_key()
    with Child("huey_app:worker") as worker:
        result = module.hold(key)
        _, pid, holder = heard(key, 30)
        assert holder == f"hold[{result.id}]"
        assert int(pid) == worker.pid
        assert not is_free(key)
        broker.rpush(f"go:{key}", "go")
        assert heard(key) == ["done"]
        with make(other):
            module.again(other)
            assert heard(other) == ["refused"]
        while (said := heard(other)) == ["refused"]:
            pass
        assert said == ["done"]
        eventually(lambda: is_free(key))
        module.hold_until_killed(key)
        heard(key)
        worker.sigkill()
        killed = time.monotonic()
        with make(key, timeout=10):
            assert time.monotonic() - killed < 1.5 + 2.5
