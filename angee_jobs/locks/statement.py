"""What a ``with`` statement calls to leave its block: an object that only that statement has."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from .background import Finalizer, background
from .block import Entrance, Entry, calling, opening


class Exit:
    """``__exit__`` or ``__aexit__``, as a descriptor: each with statement gets an object that only it has.

    An exception that strikes at the very first instruction of ``__exit__`` leaves the statement without any code of
    ours having run. (In a test with a short body one in a hundred did.) A lock that is not dropped then, since it is a
    module's, say, would be renewed for ever. But the object that the interpreter was about to call is dropped.
    ``contextlib.ExitStack`` asks the class instead of the object, and keeps what it gets in the same way.
    """

    def __init__(self, leave: Callable[..., Any], leave_of_class: Callable[..., Any]) -> None:
        self._leave = leave
        self._leave_of_class = leave_of_class

    def __get__(self, manager: Any, manager_class: Any) -> Any:
        entry = Entry(None) if manager is None else manager._entrance.entry_class(manager._entrance)
        # Not a bound method, which the interpreter takes apart, and drops, before it makes the call.
        leave = functools.partial(self._leave_of_class if manager is None else self._leave, entry)
        entry.statement = Finalizer(leave, background.put)
        entry.statement.run = entry.dropped  # a cycle, until the block is left or dropped
        opening[threading.get_ident()] = entry
        return leave


def _entry_to_leave(entry: Entry, entrance: Entrance | None) -> Entry:
    """The entry that ``__exit__`` is about: by hand, that is the caller's innermost, or just the innermost."""
    if entry.caller:
        return entry
    opening.pop(threading.get_ident(), None)
    entrance = entrance or entry.entrance
    entry.statement = entry.entrance = None
    open_here = [each for each in entrance.entries if not each.left] if entrance is not None else []
    mine = [each for each in open_here if each.caller == calling()]
    return next(reversed(mine or open_here), entry)


def _leave(entry: Entry, exc_type: object, exc: BaseException | None, traceback: object) -> None:
    _entry_to_leave(entry, None).leave(exc)


def _leave_of_class(entry: Entry, manager: Any, exc_type: object, exc: BaseException | None, traceback: object) -> None:
    _entry_to_leave(entry, manager._entrance).leave(exc)


def _aleave(entry: Entry, exc_type: object, exc: BaseException | None, traceback: object) -> Any:
    return _aleaving(_entry_to_leave(entry, None), exc, entry.statement and entry.statement())


async def _aleaving(entry: Entry, exc: BaseException | None, statement: object) -> None:
    # Keeps the statement's object, which the interpreter drops before it awaits this. Without it the background thread
    # took the block for one that is gone, and at times released first: no loss was told.
    await entry.aleave(exc)


def _aleave_of_class(entry: Entry, manager: Any, exc_type: object, exc: BaseException | None, traceback: object) -> Any:
    return _entry_to_leave(entry, manager._entrance).aleave(exc)


exit_of_statement = Exit(_leave, _leave_of_class)
aexit_of_statement = Exit(_aleave, _aleave_of_class)
