"""RQ: jobs that lock, the recipe of docs/howto/rq-dramatiq-huey.md, and a worker."""

import os

import redis
from rq import Queue, SimpleWorker, Worker
from rq.job import Job

from angee_jobs.integrations import running_task
from angee_jobs.locks import lock_info, locked
from tests.support.children.talk import tell, wait_for_go


class LockingJob(Job):
    def perform(self):
        with running_task(self.func_name, self.id):
            return super().perform()


def by_key(key, *args):
    return key


@locked(by_key, backend="sqlite", ttl=20)
def hold(key):
    tell(key, "in", os.getpid(), lock_info(key, backend="sqlite").holder.task)
    wait_for_go(key)
    return "done"


@locked(by_key, backend="sqlite", ttl=1.5)
def hold_until_killed(key):
    tell(key, "in", os.getpid())
    wait_for_go(key)


@locked(by_key, backend="sqlite", on_refused="skip")
def skip(key):
    return "done"


@locked(by_key, backend="sqlite")
def fail(key):
    return "done"


def queue(name):
    # Not decode_responses: RQ keeps pickles.
    connection = redis.Redis(unix_socket_path=os.environ["ANGEE_JOBS_TEST_BROKER"])
    return Queue(name, connection=connection, job_class=LockingJob)


def worker(kind, name):
    made = queue(name)
    worker_class = {"fork": Worker, "simple": SimpleWorker}[kind]
    worker_class([made], connection=made.connection, job_class=LockingJob).work(logging_level="INFO")
