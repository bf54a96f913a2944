"""``OnceTask``: a Celery task that is queued or runs at most once at a time for the same arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, ClassVar

from celery import current_task, uuid
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore
from celery.result import AsyncResult
from celery.signals import task_revoked
from celery.states import FAILURE
from celery.utils.time import maybe_make_aware
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

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
from ..locks.conf import lock_backends
from .arguments import canonical
from .names import running_task, task_id_of
from .refusals import Try, answer

logger = logging.getLogger("angee_jobs.integrations")

#: The message's header: with the key and the owner id of the hold that the message carries, or with the holder that
#: made it a duplicate, which its worker is to tell.
HEADER = "angee_jobs_once"

#: What Celery passes to ``apply_async`` for a step of a canvas, and for a retry: its result is waited for, by its id.
_OF_A_CANVAS = ("chain", "chord", "group_id", "parent_id", "reply_to", "root_id")
#: They call a task's function once for each of their elements. ``chunks`` is made of the second.
_MAPS = ("celery.map", "celery.starmap")


class DuplicateTaskError(LockNotAcquiredError):
    """The same task with the same arguments is queued, or runs, already. ``task_id`` is its id, or None."""

    task_id: str | None = None


class DuplicateResult(AsyncResult):  # type: ignore[misc]
    """What ``apply_async`` returns for a duplicate when asked not to raise: the result of the task that is in the way.

    ``holder`` is the :class:`~angee_jobs.locks.LockInfo` of its lock, or None if it has just ended. If it is not known
    to be a task, there is no result to wait for: the id is that of the refused call, and ``get()`` raises
    :class:`DuplicateTaskError`.
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

    ``unique_on``: the names of the arguments that make a task the same; without it, all of them do. Their values are
    str, numbers, dates, UUIDs, bytes, None, and lists and dicts of such; TypeError for a set, a model, other objects.
    ``raise_on_duplicate``: True raises :class:`DuplicateTaskError`, False returns a :class:`DuplicateResult`. In a
    chain, group or chord the message is sent all the same, and its task fails with that error, or succeeds with a dict
    ``{"refused": ..., "held_by": ...}`` for a value, without having run: so what waits for it goes on.
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
    throws = (DuplicateTaskError,)  # the worker logs it as a line, not as an error with a traceback

    unique_on: ClassVar[Sequence[str] | None] = None
    raise_on_duplicate: ClassVar[bool] = True
    lock_backend: ClassVar[str] = "default"
    lock_ttl: ClassVar[float | None] = None
    queue_ttl: ClassVar[float] = 3600.0

    # In the process that queues.

    def lock_key(self, args: Sequence[Any], kwargs: dict[str, Any]) -> LockKey:
        """The key that tasks with these arguments share. Override it for a key of your own."""
        dump = getattr(self, "_dump_pydantic_arguments", None)  # of a task with pydantic=True: as its worker gets them
        if dump is not None:
            args, kwargs = dump(args, kwargs)
        bound = inspect.signature(self.run).bind(*args, **kwargs)
        bound.apply_defaults()
        names = list(bound.arguments) if self.unique_on is None else list(self.unique_on)
        unknown = [name for name in names if name not in bound.arguments]
        if unknown:
            raise ImproperlyConfigured(f"unique_on of {self.name} names {unknown}, which are no arguments of it")
        return LockKey("once", (self.name, *(f"{name}={self._spelled(name, bound.arguments[name])}" for name in names)))

    def _spelled(self, name: str, value: Any) -> str:
        try:
            return canonical(value)
        except TypeError as error:
            raise TypeError(
                f"The argument {name!r} of {self.name} cannot tell a duplicate: {error}. Or name other arguments in "
                f"unique_on, or override lock_key()."
            ) from None

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
        """As Celery's, but DuplicateTaskError or a DuplicateResult for a duplicate. LockBackendError if the backend
        cannot tell: then nothing is queued. In a canvas the worker tells either, as the result of the task.
        """
        self._check_backend()
        task_id = task_id or uuid()
        in_canvas = any(options.get(name) is not None for name in _OF_A_CANVAS)
        try:
            ticket = self._ticket_for_message(args or (), kwargs or {}, task_id, self._seconds_in_queue(options))
        except DuplicateTaskError as duplicate:
            # An error here would fail the task before it in a chain, or leave a group half queued; and without a
            # message the rest of the chain, the chord or the callback would wait for ever.
            told_here = not in_canvas and (self.raise_on_duplicate or not (link or link_error))
            what = "is not queued" if told_here else "ends without running"
            logger.info("Task %s[%s] is a duplicate and %s: %s", self.name, task_id, what, duplicate)
            if told_here:
                if self.raise_on_duplicate:
                    raise
                return self._duplicate_result(duplicate, task_id)
            ticket = {**answer(duplicate), "task_id": duplicate.task_id}
        except Exception as error:
            if not in_canvas:
                raise
            ticket = None  # the worker takes the lock, or it is this task that fails, and not the one before it
            logger.warning("Task %s[%s] is sent without its lock: %s", self.name, task_id, error)
        headers = {name: value for name, value in (options.pop("headers", None) or {}).items() if name != HEADER}
        if ticket is not None:
            headers[HEADER] = ticket
        try:
            return super().apply_async(
                args, kwargs, task_id, producer, link, link_error, shadow, headers=headers, **options
            )
        except BaseException:
            _give_up(ticket, self.lock_backend)
            raise

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """As Celery's; a duplicate that is found at the commit is only logged. TypeError here, not at the commit."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(
        self, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None, *more: Any, **options: Any
    ) -> None:
        """As :meth:`delay_on_commit`, with the options of ``apply_async``."""
        self.lock_key(args or (), kwargs or {})
        transaction.on_commit(functools.partial(self._after_commit, args, kwargs, *more, **options))

    def _after_commit(self, *args: Any, **options: Any) -> None:
        # Raised, it would leave the block of a transaction that is committed, and drop the callbacks after this one.
        with contextlib.suppress(DuplicateTaskError):
            self.apply_async(*args, **options)

    def _check_backend(self) -> None:
        backend = lock_backends.operations(self.lock_backend)
        why = ""
        if not backend.leases:
            why = f"needs a lease, and the locks of {self.lock_backend!r} cannot leave the process that takes them"
        elif not backend.cross_process and not self.app.conf.task_always_eager:
            why = f"needs a lock that its workers see, and {self.lock_backend!r} is local to this process"
        if why:
            raise ImproperlyConfigured(
                f"OnceTask ({self.name}) {why}. Set its lock_backend= to an alias of TableLockBackend or "
                f"RedisLockBackend."
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

    def _ticket_for_message(
        self, args: Sequence[Any], kwargs: dict[str, Any], task_id: str, ttl: float
    ) -> dict[str, Any] | None:
        """Take the lock for a message, or pass on that of the run that is retried or replaced."""
        key = self.lock_key(args, kwargs)
        run = _run.get()
        if run is not None and run.task_id == task_id and run.lock.name == key.name:
            with contextlib.suppress(LockLostError):
                return {"key": key.name, "owner": run.lock.detach(ttl)}
        with running_task(self.name, task_id):
            mine = self._lock(key)
            holder = None
            if not mine.acquire():
                holder = lock_info(key, backend=self.lock_backend)
                if holder is not None or not mine.acquire():  # a holder that cannot be found has just ended
                    raise self._duplicate(holder, key.name)
            return {"key": key.name, "owner": mine.detach(ttl)}

    def _duplicate(self, holder: LockInfo | None, name: str | None, task_id: str | None = None) -> DuplicateTaskError:
        text = f"{self.name} is queued or runs already with these arguments ({name})"
        duplicate = DuplicateTaskError(text, name=name, holder=holder)
        duplicate.task_id = task_id or _holding_task(holder)
        return duplicate

    def _duplicate_result(self, duplicate: DuplicateTaskError, task_id: str) -> DuplicateResult:
        result = DuplicateResult(duplicate.task_id or task_id, backend=self.backend, task_name=self.name, app=self.app)
        result.holder = duplicate.holder
        if duplicate.task_id is None:  # no result will be stored under this id: get() would wait for ever
            result._cache = {"status": FAILURE, "result": duplicate, "traceback": None, "children": []}
        return result

    def _lock(self, key: LockKey, **options: Any) -> Lock:
        return lock(key, ttl=self.lock_ttl, backend=self.lock_backend, **options)

    # In the worker.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        run = _run.get()
        if request.called_directly:
            if current_task and current_task.name in _MAPS:
                return self._element(args, kwargs)
            return super().__call__(*args, **kwargs)
        if run is not None and run.task_id == request.id:
            return super().__call__(*args, **kwargs)  # a plain call from the task's own body
        ticket = _ticket(request)
        if ticket is not None and "refused" in ticket:
            return self._end(ticket, self._duplicate(None, ticket["refused"], ticket["task_id"]))
        key = LockKey.parse(ticket["key"]) if ticket is not None else self.lock_key(args, kwargs)
        held = self._adopt(key, ticket) or self._lock(key, timeout=self._patience(key))
        with Try(held) as refused:
            if refused is not None:
                return self._refused(refused)
            token = _run.set(_Run(request.id, held))
            try:
                return self.run(*args, **kwargs)
            finally:
                _run.reset(token)

    def _element(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call by ``celery.map``: as a worker's, and its duplicate is that element's value or fails the map."""
        with Try(self._lock(self.lock_key(args, kwargs))) as refused:
            if refused is not None:
                return self._end(answer(refused), self._duplicate(refused.holder, refused.name))
            return super().__call__(*args, **kwargs)

    def _end(self, answer: dict[str, Any], duplicate: DuplicateTaskError) -> Any:
        if self.raise_on_duplicate:
            raise duplicate
        return {name: answer[name] for name in ("refused", "held_by")}

    def _adopt(self, key: LockKey, ticket: dict[str, Any] | None) -> Lock | None:
        """Works once: for the first delivery of a message, and while its time in the queue is not over."""
        if ticket is None:  # sent by name or without its lock, or run by apply()
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
        return (self.lock_ttl or lock_backends.operations(self.lock_backend).ttl) + 1.0

    def _refused(self, refused: LockNotAcquiredError) -> Any:
        if _holding_task(refused.holder) == self.request.id:
            logger.warning("%s[%s] was delivered again while it runs", self.name, self.request.id)
            raise Ignore  # its result is for the one that runs to store
        logger.warning("%s[%s] waited too long in the queue and is a duplicate now", self.name, self.request.id)
        return self._end(answer(refused), self._duplicate(refused.holder, refused.name))


def _ticket(request: Any) -> dict[str, Any] | None:
    return (request.headers or {}).get(HEADER)


def _holding_task(info: LockInfo | None) -> str | None:
    return task_id_of(info.holder.task) if info is not None and info.holder is not None else None


def _give_up(ticket: dict[str, Any] | None, backend: str) -> None:
    """Free the lock of a message that will not run, unless a worker has adopted it."""
    if ticket is None or "owner" not in ticket:
        return
    name = ticket["key"]
    try:
        attach_lock(LockKey.parse(name), ticket["owner"], backend=backend).release()
    except LockLostError:
        pass
    except LockError as error:
        logger.warning("The lock %s of a task that will not run could not be released: %s", name, error)


@task_revoked.connect(dispatch_uid="angee_jobs.locks")  # type: ignore[untyped-decorator]
def _revoked(sender: Any, request: Any, **kwargs: Any) -> None:
    """Revoked or expired before it started. One that was terminated is a lost worker: its lock runs out."""
    if isinstance(sender, OnceTask):
        _give_up(_ticket(request), sender.lock_backend)
