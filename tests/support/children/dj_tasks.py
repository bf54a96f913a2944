"""Django tasks, a process that queues them, and a `db_worker`. Tasks speak to the test through their worker."""

import asyncio
import json
import sys

from django.core.management import call_command

from angee_jobs.integrations.django_tasks import locked
from angee_jobs.locks import attach_lock, lock, lock_info
from tests.support.children import hear, say

try:
    from django.tasks import task, task_backends
except ImportError:  # before Django 6.0
    from django_tasks import task, task_backends


def by_key(key, *args):
    return key


@task
@locked(by_key, ttl=20)
def hold(key):
    """Stay in the body until the test says so."""
    say("in", lock_info(key).holder.task)
    hear("go")
    return "done"


@task
@locked(by_key, ttl=1.5)
def hold_until_killed(key):
    say("in")
    hear("go")


@task
@locked(by_key, on_refused="skip")
def skip(key):
    return "done"


@task
@locked(by_key, on_refused="skip")
async def askip(key):
    await asyncio.sleep(0)
    return lock_info(key).holder.task if key.endswith("holder") else "done"


@task
@locked(by_key, on_refused="raise")
def fail(key):
    return "done"


@task(takes_context=True)
@locked(by_key, on_refused="retry", retry_delay=0.2)
def again(context, key, number):
    return f"done {number} {context.attempt}"


@task
@locked(by_key, on_refused="retry", retry_delay=0.2)
async def aagain(key):
    return "done"


@task(backend="immediate")
def inner(key):
    with lock(f"{key}-inner") as held:
        return held.ainfo and lock_info(f"{key}-inner").holder.task


@task
@locked(by_key)
def outer(key):
    before = inner.enqueue(key).return_value
    with lock(f"{key}-outer"):
        return [before, lock_info(f"{key}-outer").holder.task]


@task(backend="immediate")
@locked(by_key, on_refused="retry")
def cannot_defer(key):
    return "done"


@task
def adopt(key, owner_id):
    with attach_lock(key, owner_id, ttl=2):
        return lock_info(key).holder.task


def main():
    """Queue what the test names, and tell how it ended."""
    say("ready")
    while line := hear():
        command, name, *args = json.loads(line)
        if command == "enqueue":
            result = globals()[name].enqueue(*args)
            say(result.id)
        elif command == "call":
            try:
                say(json.dumps(globals()[name].call(*args)))
            except Exception as error:
                say(type(error).__name__)
        else:
            result = task_backends["default"].get_result(name)
            value = result._return_value if result.status == "SUCCESSFUL" else None
            errors = [error.exception_class_path for error in result.errors]
            say(json.dumps({"status": str(result.status.value), "value": value, "errors": errors}))


def migrate():
    call_command("migrate", verbosity=0)
    say("migrated")


def worker():
    say("ready")
    call_command("db_worker", queue_name="*", interval=0.02, startup_delay=False, reload=False, stdout=sys.stderr)
