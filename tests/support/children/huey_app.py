"""Huey: tasks that lock, the recipe of docs/howto/rq-dramatiq-huey.md, and a consumer."""

import os
import threading

from huey import RedisHuey
from huey.exceptions import RetryTask

from angee_jobs.integrations import running_task
from angee_jobs.locks import LockNotAcquiredError, lock_info, locked
from tests.support.children.talk import tell, wait_for_go

huey = RedisHuey("tests", url=f"unix://{os.environ['ANGEE_JOBS_TEST_BROKER']}")
_local = threading.local()


@huey.pre_execute()
def name_task(task):
    _local.block = running_task(task.name, task.id)
    _local.block.__enter__()


@huey.post_execute()
def forget_task(task, value, error):
    _local.block.__exit__(None, None, None)


def by_key(key, *args):
    return key


@huey.task()
@locked(by_key, backend="sqlite", ttl=20)
def hold(key):
    tell(key, "in", os.getpid(), lock_info(key, backend="sqlite").holder.task)
    wait_for_go(key)
    tell(key, "done")


@huey.task()
@locked(by_key, backend="sqlite", ttl=1.5)
def hold_until_killed(key):
    tell(key, "in", os.getpid())
    wait_for_go(key)


@huey.task()
def again(key):
    try:
        run(key)
    except LockNotAcquiredError as refused:
        tell(key, "refused")
        raise RetryTask(delay=1) from refused


@locked(by_key, backend="sqlite")
def run(key):
    tell(key, "done")


def worker():
    huey.create_consumer(workers=2, worker_type="thread", initial_delay=0.02, max_delay=0.1).run()
