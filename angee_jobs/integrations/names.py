"""The task that runs now, as the holder of a lock shows it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from django.apps import apps

from ..locks.holder import current_task


def task_text(name: str, task_id: object) -> str:
    return f"{name}[{task_id}]"


def task_id_of(text: str) -> str | None:
    """The id in what :func:`task_text` made; None if it made something else."""
    name, bracket, rest = text.rpartition("[")
    return rest[:-1] if name and bracket and rest.endswith("]") and len(rest) > 1 else None


@contextlib.contextmanager
def running_task(name: str, task_id: object) -> Iterator[None]:
    """Inside the block, the locks that are taken name this task and its id as their holder.

    Example::

        class LockingJob(rq.job.Job):
            def perform(self):
                with running_task(self.func_name, self.id):
                    return super().perform()
    """
    token = current_task.set(task_text(name, task_id))
    try:
        yield
    finally:
        current_task.reset(token)


def connect() -> None:
    """Let the queues that this project uses name their tasks. Called when Django is set up."""
    from django.utils.module_loading import import_string

    try:
        import django.tasks  # noqa: F401  from Django 6.0 on
    except ImportError:
        has_tasks = apps.is_installed("django_tasks")
    else:
        has_tasks = True
    if has_tasks:
        import_string("angee_jobs.integrations.django_tasks.locked")
    if "celery" in sys.modules:  # a project that runs Celery has made its app before Django is set up
        import_string("angee_jobs.integrations.celery.locked")
