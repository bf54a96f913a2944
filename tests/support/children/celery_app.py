"""A Celery app on a Valkey broker, its tasks, and the worker's command line."""

import os

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from angee_jobs.integrations.celery import OnceTask, locked
from angee_jobs.locks import lock, lock_info
from tests.support.children.talk import tell, wait_for_go

URL = f"redis+socket://{os.environ['ANGEE_JOBS_TEST_BROKER']}"
app = Celery("angee-tests", broker=URL, backend=URL)
app.conf.update(
    task_default_queue=os.environ.get("ANGEE_JOBS_TEST_QUEUE", "celery"),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_send_task_events=False,
    broker_transport_options={"visibility_timeout": 3600},
    result_expires=600,
    worker_lost_wait=0.2,
    worker_hijack_root_logger=False,
    imports=["tests.support.children.celery_canvas"],
)


def by_key(key, *args):
    return key


def holder(key):
    info = lock_info(key, backend="sqlite")
    return info.holder.task if info else ""


@app.task
@locked(by_key, backend="sqlite", ttl=20)
def hold(key):
    tell(key, "in", os.getpid(), holder(key))
    wait_for_go(key)
    return "done"


@app.task
@locked(by_key, backend="sqlite", ttl=1.5)
def hold_until_killed(key):
    tell(key, "in", os.getpid(), holder(key))
    wait_for_go(key)


@app.task(acks_late=True, reject_on_worker_lost=True)
@locked(by_key, backend="sqlite", ttl=2, timeout=10)
def hold_late(key):
    tell(key, "in", os.getpid())
    wait_for_go(key)
    return "done"


@app.task(soft_time_limit=2)
@locked(by_key, backend="sqlite", ttl=20)
def limited(key):
    tell(key, "in", os.getpid())
    try:
        wait_for_go(key)
    except SoftTimeLimitExceeded:
        tell(key, "struck")
        raise


@app.task(time_limit=2)
@locked(by_key, backend="sqlite", ttl=1.5)
def killed(key):
    tell(key, "in", os.getpid())
    wait_for_go(key)


@app.task
@locked(by_key, backend="sqlite", on_refused="skip")
def skip(key):
    return "done"


@app.task
@locked(by_key, backend="sqlite")
def fail(key):
    return "done"


@app.task(bind=True, max_retries=50)
@locked(by_key, backend="sqlite", on_refused="retry", retry_delay=0.1)
def again(self, key):
    return f"done {self.request.retries > 0}"


@app.task
@locked(by_key, backend="sqlite", on_refused="retry", retry_delay=0.05, max_retries=2)
def again_twice(key):
    return "done"


@app.task
def nested(key):
    fail.apply(args=[f"{key}-inner"])
    with lock(key, backend="sqlite"):
        return holder(key)


class Once(OnceTask):
    abstract = True
    lock_backend = "sqlite"
    lock_ttl = 2.5
    queue_ttl = 60


@app.task(base=Once, bind=True, unique_on=["key"])
def once(self, key, number=0):
    tell(key, "in", os.getpid(), self.request.id)
    wait_for_go(key)
    return f"done {number}"


@app.task(base=Once, unique_on=["key"], lock_ttl=2)
def once_until_killed(key, number=0):
    tell(key, "in", os.getpid())
    wait_for_go(key)
    return f"done {number}"


@app.task(base=Once, unique_on=["key"], raise_on_duplicate=False)
def once_told(key, number=0):
    tell(key, "in", os.getpid())
    wait_for_go(key)
    return f"done {number}"


@app.task(base=Once)
def once_fails(key):
    raise ValueError("on purpose")


@app.task(base=Once, bind=True, unique_on=["key"], max_retries=3, lock_ttl=2)
def once_retries(self, key, countdown):
    tell(key, "in", self.request.retries, holder(self.lock_key([key, countdown], {})))
    if self.request.retries == 0:
        raise self.retry(countdown=countdown)
    if countdown:
        wait_for_go(key)
    return "done"


@app.task(
    base=Once, unique_on=["key"], autoretry_for=[KeyError], retry_backoff=False, default_retry_delay=0, max_retries=1
)
def once_autoretries(key):
    tell(key, "in")
    raise KeyError("on purpose")


@app.task(base=Once, unique_on=["key"], acks_late=True, reject_on_worker_lost=True, lock_ttl=2)
def once_late(key):
    tell(key, "in", os.getpid())
    wait_for_go(key)
    return "done"


@app.task(base=Once, unique_on=["key"], queue_ttl=0.3, lock_ttl=20)
def once_short(key):
    tell(key, "in", os.getpid())
    wait_for_go(key)
    return "done"


@app.task(base=OnceTask, lock_backend="session")
def once_on_a_session_lock(key):
    return "never"


@app.task(base=OnceTask, lock_backend="local")
def once_on_a_local_lock(key):
    return "never"


@app.task(base=Once, unique_on=["nobody"])
def once_on_what_is_not_there(key):
    return "never"


def worker(pool, concurrency, *more):
    alone = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", "-P", pool, "-c", concurrency, "-l", "INFO", *alone, *more])
