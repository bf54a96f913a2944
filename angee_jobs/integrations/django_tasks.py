"""Django's tasks (Django 6.0 and later, or the backport ``django-tasks``): ``locked``, for use under ``@task``.

The holder of a lock that was taken in a task names the task and the id of its result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar

from django.utils import timezone

from ..locks import LockKey, LockNotAcquiredError
from ..locks.holder import current_task
from .names import task_text
from .refusals import answer, later, locked_task

try:
    from django.tasks import TaskContext
    from django.tasks.signals import task_finished, task_started
except ImportError:  # before Django 6.0
    from django_tasks import TaskContext  # type: ignore[no-redef]
    from django_tasks.signals import task_finished, task_started  # type: ignore[no-redef]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("angee_jobs.integrations")

#: The results of the tasks that run here, the innermost last, each with the holder's text from before it.
_running: ContextVar[tuple[tuple[Any, str], ...]] = ContextVar("angee_jobs_running_tasks", default=())


def _started(sender: Any, task_result: Any, **kwargs: Any) -> None:
    _running.set((*_running.get(), (task_result, current_task.get())))
    current_task.set(task_text(task_result.task.module_path, task_result.id))


def _finished(sender: Any, task_result: Any, **kwargs: Any) -> None:
    running = _running.get()
    for at in reversed(range(len(running))):  # whatever is above it ended without a word
        if running[at][0].id == task_result.id:
            _running.set(running[:at])
            current_task.set(running[at][1])
            return


task_started.connect(_started, dispatch_uid="angee_jobs.locks")
task_finished.connect(_finished, dispatch_uid="angee_jobs.locks")


def locked(
    key: LockKey | str | Callable[..., LockKey | str],
    *,
    on_refused: Literal["raise", "skip", "retry"] = "raise",
    retry_delay: float = 60.0,
    **options: Any,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a task under a lock. Stands below ``@task``, and takes what ``angee_jobs.locks.locked`` takes.

    When another holder has the lock, ``on_refused`` decides: ``"raise"`` fails the task with LockNotAcquiredError;
    ``"skip"`` ends it as successful, with a return value that says by whom it was refused; ``"retry"`` does the same
    after having queued it again, to run after ``retry_delay`` seconds or up to half as much later, which needs a task
    backend that can defer. A callable ``key`` gets the task's arguments, without the context.

    Example::

        @task
        @locked(lambda channel_id: record_lock_key("messaging.Channel", channel_id, "sync"), on_refused="retry")
        def sync_channel(channel_id): ...
    """

    def again(refused: LockNotAcquiredError) -> tuple[Any, Any]:
        running = _running.get()
        if not running:  # called as a plain function: there is nothing to queue again
            raise refused
        result = running[-1][0]
        return result, result.task.using(run_after=timezone.now() + timedelta(seconds=later(retry_delay)))

    def tell(refused: LockNotAcquiredError, result: Any, queued: Any) -> dict[str, str]:
        logger.info("Task %s was refused a lock and is queued again as %s", result.id, queued.id)
        return answer(refused, queued_again=str(queued.id))

    def retry(refused: LockNotAcquiredError) -> dict[str, str]:
        result, deferred = again(refused)
        return tell(refused, result, deferred.enqueue(*result.args, **result.kwargs))

    async def aretry(refused: LockNotAcquiredError) -> dict[str, str]:
        result, deferred = again(refused)
        return tell(refused, result, await deferred.aenqueue(*result.args, **result.kwargs))

    return locked_task(
        key,
        on_refused=on_refused,
        retry=retry,
        aretry=aretry,
        is_context=lambda first: isinstance(first, TaskContext),
        options=options,
    )
