"""``OnceTask``: a Celery task that is queued or runs at most once at a time for the same arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, ClassVar

from celery import uuid
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore
from celery.result import AsyncResult
from celery.signals import task_revoked
from celery.utils.time import maybe_make_aware
from django.core.exceptions import ImproperlyConfigured

from ..locks import (
    Lock,
    LockError,
    LockInfo,
    LockKey,
    LockLostError,
    LockNotAcquiredError,
    attach_lock,
    lock,
    lock_info,
)
from ..locks.acquiring import leases_only
from ..locks.conf import lock_backends
from .names import running_task, task_id_of
from .refusals import Try, answer

logger = logging.getLogger("angee_jobs.integrations")

#: The message's header with the key and the owner id of the hold that the message carries.
HEADER = "angee_jobs_once"


class DuplicateTaskError(LockNotAcquiredError):
    """The same task with the same arguments is queued, or runs, already. ``task_id`` is its id, or None."""

    task_id: str | None = None


class DuplicateResult(AsyncResult):  # type: ignore[misc]
    """What ``apply_async`` returns for a duplicate when asked not to raise: the result of the task that is in the way.

    ``holder`` is the :class:`~angee_jobs.locks.LockInfo` of its lock, or None if it has just ended; the id is then
    that of the call that was refused, which never runs.
    """

    holder: LockInfo | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """A run of a task in this process, and the hold that it has."""

    task_id: str
    lock: Lock


_run: ContextVar[_Run | None] = ContextVar("angee_jobs_once_run", default=None)


class OnceTask(DjangoTask):  # type: ignore[misc]
    """Base class of tasks of which a second one is refused while the first is queued or runs.

    The lock is taken in ``apply_async`` and travels with the message. The worker that runs the task adopts and renews
    it; it is given up when the task ends or fails, and when it is revoked or expires before it started. A retry keeps
    it over its countdown. Of a worker that is lost, or a process that is killed, it comes free within ``lock_ttl``.

    ``unique_on``: the names of the arguments that make a task the same; without it, all of them do.
    ``raise_on_duplicate``: True raises :class:`DuplicateTaskError`, False returns a :class:`DuplicateResult`.
    ``lock_backend``: an alias in ``ANGEE_JOBS_LOCKS``. Its locks must be leases (TableLockBackend, RedisLockBackend):
    ImproperlyConfigured for session locks, which cannot leave the process that takes them.
    ``lock_ttl``: seconds after which the lock of a lost worker is free; None leaves it to the backend.
    ``queue_ttl``: seconds that a message may wait in the queue, beyond its countdown; afterwards its lock is free and
    a duplicate may be queued. A message with ``expires`` keeps its lock until then instead.

    Example::

        @app.task(base=OnceTask, unique_on=["report_id"], raise_on_duplicate=False, lock_backend="leases")
        def make_report(report_id, requested_by): ...
    """

    abstract = True

    unique_on: ClassVar[Sequence[str] | None] = None
    raise_on_duplicate: ClassVar[bool] = True
    lock_backend: ClassVar[str] = "default"
    lock_ttl: ClassVar[float | None] = None
    queue_ttl: ClassVar[float] = 3600.0

    # In the process that queues.

    def lock_key(self, args: Sequence[Any], kwargs: dict[str, Any]) -> LockKey:
        """The key that tasks with these arguments share. Override it for a key of your own."""
        bound = inspect.signature(self.run).bind(*args, **kwargs)
        bound.apply_defaults()
        names = list(bound.arguments) if self.unique_on is None else list(self.unique_on)
        unknown = [name for name in names if name not in bound.arguments]
        if unknown:
            raise ImproperlyConfigured(f"unique_on of {self.name} names {unknown}, which are no arguments of it")
        values = (json.dumps(bound.arguments[name], sort_keys=True, default=str) for name in names)
        return LockKey("once", (self.name, *(f"{name}={value}" for name, value in zip(names, values, strict=True))))

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """As Celery's, but DuplicateTaskError or a DuplicateResult for a duplicate. LockBackendError if nobody can
        tell: then nothing is queued.
        """
        self._check_backend()
        key = self.lock_key(args or (), kwargs or {})
        task_id = task_id or uuid()
        ttl = self._seconds_in_queue(options)
        try:
            owner = self._owner_for_message(key, task_id, ttl)
        except DuplicateTaskError as duplicate:
            logger.info("Task %s[%s] is a duplicate and not queued: %s", self.name, task_id, duplicate)
            if self.raise_on_duplicate:
                raise
            return self._duplicate_result(duplicate, task_id)
        headers = {**(options.pop("headers", None) or {}), HEADER: {"key": key.name, "owner": owner}}
        try:
            return super().apply_async(
                args, kwargs, task_id, producer, link, link_error, shadow, headers=headers, **options
            )
        except BaseException:
            _give_up(key.name, owner, self.lock_backend)
            raise

    def _check_backend(self) -> None:
        backend = lock_backends.verbs(self.lock_backend)
        leases_only(backend, f"OnceTask ({self.name})")
        if not backend.cross_process and not self.app.conf.task_always_eager:
            raise ImproperlyConfigured(
                f"OnceTask ({self.name}) needs a lock that its workers see, and {self.lock_backend!r} is local to "
                f"this process. Set lock_backend to an alias of TableLockBackend or RedisLockBackend."
            )

    def _seconds_in_queue(self, options: dict[str, Any]) -> float:
        """How long the message may have to wait for its worker."""
        expires = options.get("expires", self.expires)
        if expires is not None:
            return max(self._seconds_until(expires), 1.0)
        eta = options.get("eta")
        delay = self._seconds_until(eta) if eta is not None else float(options.get("countdown") or 0)
        return max(delay, 0.0) + self.queue_ttl

    def _seconds_until(self, when: Any) -> float:
        if isinstance(when, str):
            when = datetime.fromisoformat(when)
        if isinstance(when, datetime):
            when = (maybe_make_aware(when, self.app.timezone) - datetime.now(UTC)).total_seconds()
        return float(when)

    def _owner_for_message(self, key: LockKey, task_id: str, ttl: float) -> str:
        """Take the lock for a message, or pass on that of the run which is being retried."""
        run = _run.get()
        if run is not None and run.task_id == task_id and run.lock.name == key.name:
            with contextlib.suppress(LockLostError):
                return run.lock.detach(ttl)
        with running_task(self.name, task_id):
            mine = self._lock(key)
            if mine.acquire():
                return mine.detach(ttl)
            holder = lock_info(key, backend=self.lock_backend)
            if holder is None and mine.acquire():  # it has just ended
                return mine.detach(ttl)
        raise self._duplicate(holder, key.name)

    def _duplicate(self, holder: LockInfo | None, name: str | None) -> DuplicateTaskError:
        text = f"{self.name} is queued or runs already with these arguments ({name})"
        duplicate = DuplicateTaskError(text, name=name, holder=holder)
        duplicate.task_id = _holding_task(holder)
        return duplicate

    def _duplicate_result(self, duplicate: DuplicateTaskError, task_id: str) -> DuplicateResult:
        result = DuplicateResult(duplicate.task_id or task_id, backend=self.backend, task_name=self.name, app=self.app)
        result.holder = duplicate.holder
        return result

    def _lock(self, key: LockKey, **options: Any) -> Lock:
        return lock(key, ttl=self.lock_ttl, backend=self.lock_backend, **options)

    # In the worker.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        run = _run.get()
        if request.called_directly or (run is not None and run.task_id == request.id):
            return super().__call__(*args, **kwargs)  # a plain call, perhaps from the task's own body
        ticket = _ticket(request)
        key = LockKey.parse(ticket["key"]) if ticket else self.lock_key(args, kwargs)
        held = self._adopt(key, ticket) or self._lock(key, timeout=self._patience(key))
        with Try(held) as refused:
            if refused is not None:
                return self._refused(refused)
            token = _run.set(_Run(request.id, held))
            try:
                return self.run(*args, **kwargs)
            finally:
                _run.reset(token)

    def _adopt(self, key: LockKey, ticket: dict[str, str] | None) -> Lock | None:
        """Works once: for the first delivery of a message, and while its time in the queue is not over."""
        if ticket is None:  # sent by name, or run by apply()
            return None
        try:
            return attach_lock(key, ticket["owner"], ttl=self.lock_ttl, backend=self.lock_backend)
        except LockLostError:
            return None

    def _patience(self, key: LockKey) -> float | None:
        """How long to wait for a lock that does not come with the message.

        Where an earlier delivery of this very message has it, its worker may be lost: that is known after one ttl.
        """
        if _holding_task(lock_info(key, backend=self.lock_backend)) != self.request.id:
            return None
        return (self.lock_ttl or lock_backends.verbs(self.lock_backend).ttl) + 1.0

    def _refused(self, refused: LockNotAcquiredError) -> Any:
        if _holding_task(refused.holder) == self.request.id:
            logger.warning("%s[%s] was delivered again while it runs", self.name, self.request.id)
            raise Ignore  # its result is for the one that runs to store
        logger.warning("%s[%s] waited too long in the queue and is a duplicate now", self.name, self.request.id)
        if self.raise_on_duplicate:
            raise self._duplicate(refused.holder, refused.name) from refused
        return answer(refused)


def _ticket(request: Any) -> dict[str, str] | None:
    return (request.headers or {}).get(HEADER)


def _holding_task(info: LockInfo | None) -> str | None:
    return task_id_of(info.holder.task) if info is not None and info.holder is not None else None


def _give_up(name: str, owner: str, backend: str) -> None:
    """Free the lock of a message that nobody will run, unless a worker has adopted it."""
    try:
        attach_lock(LockKey.parse(name), owner, backend=backend).release()
    except LockLostError:
        pass
    except LockError as error:
        logger.warning("The lock %s of a task that will not run could not be released: %s", name, error)


@task_revoked.connect(dispatch_uid="angee_jobs.locks")  # type: ignore[untyped-decorator]
def _revoked(sender: Any, request: Any, **kwargs: Any) -> None:
    """Revoked or expired before it started. One that was terminated is a lost worker: its lock runs out."""
    ticket = _ticket(request)
    if isinstance(sender, OnceTask) and ticket is not None:
        _give_up(ticket["key"], ticket["owner"], sender.lock_backend)
