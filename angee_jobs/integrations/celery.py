"""Celery: ``locked`` for use under ``@app.task``. ``OnceTask`` is in ``celery_once``.

The holder of a lock that was taken in a task names the task and its id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import celery
from celery.signals import task_postrun, task_prerun

from ..locks import LockKey, LockNotAcquiredError
from ..locks.holder import current_task
from .celery_once import DuplicateResult, DuplicateTaskError, OnceTask
from .names import task_text
from .refusals import later, locked_task

__all__ = ["DuplicateResult", "DuplicateTaskError", "OnceTask", "locked"]

P = ParamSpec("P")
R = TypeVar("R")

_BEFORE = "angee_jobs_task_before"


@task_prerun.connect(dispatch_uid="angee_jobs.locks")  # type: ignore[untyped-decorator]
def _started(task_id: str, task: Any, **kwargs: Any) -> None:
    setattr(task.request, _BEFORE, current_task.get())  # a task that runs eagerly has another one around it
    current_task.set(task_text(task.name, task_id))


@task_postrun.connect(dispatch_uid="angee_jobs.locks")  # type: ignore[untyped-decorator]
def _ended(task_id: str, task: Any, **kwargs: Any) -> None:
    current_task.set(getattr(task.request, _BEFORE, None) or "")


def locked(
    key: LockKey | str | Callable[..., LockKey | str],
    *,
    on_refused: Literal["raise", "skip", "retry"] = "raise",
    retry_delay: float = 60.0,
    max_retries: int | None = None,
    **options: Any,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a task under a lock. Stands below ``@app.task``, and takes what ``angee_jobs.locks.locked`` takes.

    When another holder has the lock, ``on_refused`` decides: ``"raise"`` fails the task with LockNotAcquiredError;
    ``"skip"`` ends it as successful, with a result that says by whom it was refused; ``"retry"`` is
    ``self.retry()``, after ``retry_delay`` seconds or up to half as much later, and LockNotAcquiredError after
    ``max_retries`` of them (without a number: the task's own). A callable ``key`` gets the task's arguments, without
    the ``self`` of a bound task.

    Example::

        @app.task
        @locked(lambda order_id: record_lock_key("shop.Order", order_id, "invoice"), on_refused="retry")
        def make_invoice(order_id): ...
    """

    def retry(refused: LockNotAcquiredError) -> NoReturn:
        task = celery.current_task
        if not task or task.request.called_directly:
            raise refused
        raise task.retry(countdown=later(retry_delay), exc=refused, max_retries=max_retries)

    async def aretry(refused: LockNotAcquiredError) -> NoReturn:
        retry(refused)

    return locked_task(
        key,
        on_refused=on_refused,
        retry=retry,
        aretry=aretry,
        is_context=lambda first: isinstance(first, celery.Task),
        options=options,
    )
