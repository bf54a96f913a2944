"""How people make a lock: ``lock``, ``task_lock``, ``locked`` and ``attach_lock``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar, Unpack, cast

from .block import aenter, enter
from .errors import LockLostError
from .hold import OwnerId
from .keys import LockKey
from .lock import Lock
from .misuse import check_function, check_key
from .options import LockOptions, Options, spelled_out
from .several import SeveralLocks, entrance_of
from .statement import aexit_of_statement, exit_of_statement
from .types import Seconds

P = ParamSpec("P")
R = TypeVar("R")
#: A key, or a list of them.
Keys = LockKey | str | list[LockKey] | list[str] | list[LockKey | str]


def lock(key: Keys, **options: Unpack[Options]) -> Lock:
    """A :class:`Lock` on ``key``, for ``with`` and ``async with``.

    Entering the block raises LockNotAcquiredError if somebody else holds the lock after ``timeout``. All times are
    seconds, or a timedelta.

    ``timeout``: the total wait; None tries once, now, and ``math.inf`` waits for ever.
    ``ttl``: the lock is free at most this long after its holder's death; None leaves it to the backend. The block
    renews its lease every third of it, unless ``auto_extend`` is False.
    ``hold_at_least``: the lock stays taken for this long, also when its holder is done sooner, so that another host
    whose clock is late does not run the same cron job again. ImproperlyConfigured on a session lock.
    ``hold_at_most``: the lock is taken away after this long, told as lost, however alive its holder is.
    ``cancel_on_loss``: a loss cancels the task in the body, and the block raises LockLostError; ``async with`` only.
    ``note`` is shown with the holder. ``backend`` is an alias in ``ANGEE_JOBS_LOCKS``.

    Leaving the block raises LockLostError if the lock was lost meanwhile and the body did not raise. Inside
    ``transaction.atomic()`` the lock is kept until the commit or rollback. TypeError or ValueError for a key or a
    time that cannot be; ImproperlyConfigured for an unknown backend; LockBackendError if it cannot be used.

    Example::

        with lock("billing-run", ttl=30, timeout=5) as held:
            for batch in batches:
                held.check()
                with transaction.atomic(), held.guard():
                    save(batch)
    """
    return SeveralLocks(key, **options) if isinstance(key, list) else Lock(key, **options)


class task_lock:
    """``with task_lock(key) as acquired``, or ``async with``: a bool that says whether this task may go on.

    Takes what :func:`lock` takes, and is the same lock; only a refusal is an answer here and not an error. A backend
    that cannot be used is LockBackendError here too, never False.

    Example::

        with task_lock(record_lock_key("messaging.Channel", channel_id, "sync")) as acquired:
            if not acquired:
                return  # somebody else is on it
            sync(channel_id)
    """

    def __init__(self, key: Keys, **options: Unpack[Options]) -> None:
        self._entrance = entrance_of(key, options)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            'task_lock(...) is no decorator: write @locked("name", on_refused="skip"), with the same options'
        )

    def __bool__(self) -> bool:
        raise TypeError("task_lock tells whether it was acquired in its block: `with task_lock(key) as acquired:`")

    if TYPE_CHECKING:

        def __enter__(self) -> bool: ...

        def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None: ...

        async def __aenter__(self) -> bool: ...

        async def __aexit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None: ...

    else:
        __exit__, __aexit__ = exit_of_statement, aexit_of_statement

        def __enter__(self):
            return enter(self, raises=False)

        def __aenter__(self):
            return aenter(self, raises=False)


def _body(function: Any) -> Any:
    """The function whose code a call of ``function`` runs, be that a partial or an object with ``__call__``."""
    if not callable(function):
        raise TypeError(f"@locked decorates functions, and {function!r} is none")
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function) and not isinstance(function, type):
        function = type(function).__call__
    return function


def locked(
    key: Keys | Callable[..., Keys],
    *,
    on_refused: Literal["raise", "skip"] = "raise",
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run each call of the decorated function under a lock.

    ``key`` may be a callable: it is called with the call's arguments. ``on_refused="skip"`` returns None without
    calling the function when somebody else holds the lock; ``"raise"`` raises LockNotAcquiredError. The other
    options are those of :func:`lock`. Each call has a lock of its own, so the function may be called from many
    threads at once. A generator function is a TypeError: its body runs after the call has returned.

    Example::

        @locked(lambda order_id: record_lock_key("shop.Order", order_id, "invoice"), on_refused="skip")
        def make_invoice(order_id): ...
    """
    check_key(key)
    if str(on_refused) == "retry":
        raise ValueError(
            'on_refused="retry" is for tasks: import locked from angee_jobs.integrations.celery or '
            "angee_jobs.integrations.django_tasks"
        )
    if on_refused not in ("raise", "skip"):
        raise ValueError(f'on_refused must be "raise" or "skip", not {on_refused!r}')
    if callable(key):
        LockOptions.checked(dict(options))
    else:
        lock(key, **options)  # a bad key or option is an error where it is written, not at the first call

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        check_function(function)
        body = _body(function)
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise TypeError(
                f"@locked cannot decorate the generator function {function!r}: its body runs after the call has "
                f"returned. Put the block into its body."
            )
        # The refusal of this call's own lock is a bool here, so that one which the body raises passes through.
        form = lock if on_refused == "raise" else task_lock

        def block(*args: Any, **kwargs: Any) -> Any:
            return form(key(*args, **kwargs) if callable(key) else key, **options)

        if inspect.iscoroutinefunction(body):

            @functools.wraps(function)
            async def acall(*args: P.args, **kwargs: P.kwargs) -> Any:
                async with block(*args, **kwargs) as acquired:
                    return await cast("Any", function)(*args, **kwargs) if acquired else None

            return cast("Callable[P, R]", acall)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            with block(*args, **kwargs) as acquired:
                return function(*args, **kwargs) if acquired else None

        return call

    return decorate


def attach_lock(
    key: Keys,
    owner_id: str,
    *,
    ttl: Seconds | None = None,
    auto_extend: bool = True,
    note: str = "",
    backend: str = "default",
) -> Lock:
    """Adopt a hold that was detached, here or in another process; a :class:`Lock` that holds it.

    The owner id changes in the same step, so this works once: a second delivery of the same message gets
    LockLostError, and so does one that comes after the time given to ``detach``. From now on the lease is ``ttl``
    seconds (without one: the backend's). A ``with`` block over the result renews it and releases it at its end.

    Example::

        @task
        def make_report(report_id, owner_id):
            with attach_lock(f"export-{report_id}", owner_id, backend="leases"):
                ...
    """
    if type(owner_id) is str:
        owner_id = OwnerId(owner_id)  # first of all: now no traceback's variables show it
    attached = lock(key, ttl=ttl, auto_extend=auto_extend, note=note, backend=backend)
    if not isinstance(owner_id, str):
        raise TypeError(f"owner_id must be the text that detach() returned, not {type(owner_id).__name__}")
    if not owner_id:
        raise ValueError("owner_id must be the text that detach() returned, and is empty")
    if not owner_id.isascii():
        raise LockLostError(f"There is no detached hold of {attached.name} with this owner id", name=attached.name)
    attached._adopt(owner_id)
    return attached


for _form in (lock, task_lock, locked):
    spelled_out(_form)
