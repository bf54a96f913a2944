"""Dramatiq: actors that lock, the recipe of docs/howto/rq-dramatiq-huey.md, and a worker."""

import os
import sys
import threading

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware

from angee_jobs.integrations import running_task
from angee_jobs.locks import LockNotAcquiredError, lock_info, locked
from tests.support.children.talk import tell, wait_for_go


class NameTasks(Middleware):
    """The holder of a lock shows the actor and the message that took it."""

    def __init__(self):
        self._local = threading.local()

    def before_process_message(self, broker, message):
        self._local.block = running_task(message.actor_name, message.message_id)
        self._local.block.__enter__()

    def after_process_message(self, broker, message, *, result=None, exception=None):
        self._local.block.__exit__(None, None, None)

    after_skip_message = after_process_message


broker = RedisBroker(client=redis.Redis(unix_socket_path=os.environ["ANGEE_JOBS_TEST_BROKER"]))
broker.add_middleware(NameTasks())
dramatiq.set_broker(broker)


def by_key(key, *args):
    return key


@dramatiq.actor(max_retries=0)
@locked(by_key, backend="sqlite", ttl=20)
def hold(key):
    tell(key, "in", os.getpid(), lock_info(key, backend="sqlite").holder.task)
    wait_for_go(key)
    tell(key, "done")


@dramatiq.actor(max_retries=0)
@locked(by_key, backend="sqlite", ttl=1.5)
def hold_until_killed(key):
    tell(key, "in", os.getpid())
    wait_for_go(key)


@dramatiq.actor(max_retries=1000)
def again(key):
    try:
        run(key)
    except LockNotAcquiredError as refused:
        tell(key, "refused")
        raise dramatiq.errors.Retry("somebody else is on it", delay=100) from refused


@locked(by_key, backend="sqlite")
def run(key):
    tell(key, "done")


def worker():
    from dramatiq import cli

    options = ["tests.support.children.dramatiq_app", "--processes", "1", "--threads", "2", "--path", "."]
    sys.exit(cli.main(cli.make_argument_parser().parse_args(options)))
