"""Release several holds by force, for the page of held locks, and write to the admin's log.

If one release fails, the others are still made. The command ``release_lock`` writes to the admin's log too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..locks.errors import LockBackendError
from ..locks.keys import name_digest
from ..locks.operations import force_release, holds_beside
from ..locks.types import LockInfo
from .listing import Target, explain


@dataclasses.dataclass(slots=True)
class Stuck:
    """A session whose process does not release the locks that it was asked for."""

    backend: str
    session: int
    targets: list[Target]
    #: The other holds that would end with the session.
    others: list[LockInfo]


@dataclasses.dataclass(slots=True)
class Released:
    """The outcome of releasing several holds."""

    done: list[Target] = dataclasses.field(default_factory=list)
    gone: list[Target] = dataclasses.field(default_factory=list)
    stuck: dict[tuple[str, int], Stuck] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)


def release(targets: Sequence[Target], *, user: str, reason: str, done: Callable[[Target], object]) -> Released:
    """Release each hold by force, and call ``done`` for each that was released. A failure does not stop the others."""
    result = Released()
    for target in targets:
        if target.backend in result.errors:
            continue
        try:
            released = _release_one(target, user, reason, result)
        except Exception as error:
            result.errors[target.backend] = explain(error, target.backend)
            continue
        if released is not None:
            (result.done if released else result.gone).append(target)
            if released:
                done(target)
    return result


def _release_one(target: Target, user: str, reason: str, result: Released) -> bool | None:
    """Whether it was released; None: only ending its session would free it."""
    key, alias = target.key, target.backend
    if any(backend == alias for backend, _ in result.stuck) and _is_stuck(target, result):
        return None  # the process did not answer before, so do not wait for it again
    try:
        return force_release(key, reason=reason, user=user, fencing_token=target.fencing_token, backend=alias)
    except LockBackendError:
        if not _is_stuck(target, result, newly=True):
            raise
        return None


def _is_stuck(target: Target, result: Released, *, newly: bool = False) -> bool:
    found = holds_beside(target.key, backend=target.backend)
    if found is None:
        return False
    session, infos = found
    known = (target.backend, session) in result.stuck
    if not known and not newly:
        return False
    stuck = result.stuck.setdefault((target.backend, session), Stuck(target.backend, session, [], infos))
    stuck.targets.append(target)
    stuck.others = [info for info in stuck.others if info.name not in {each.name for each in stuck.targets}]
    return True


def write_admin_log(user: Any, target: Target, reason: str) -> None:
    """Write to the admin's log that ``user`` released this hold by force, and why."""
    from django.contrib.admin.models import DELETION, LogEntry
    from django.contrib.contenttypes.models import ContentType

    from ..models import TaskLock

    which = f"backend {target.backend}, fencing token {target.fencing_token}"
    LogEntry.objects.create(
        user_id=user.pk,
        content_type=ContentType.objects.get_for_model(TaskLock),
        object_id=name_digest(target.name),
        object_repr=target.name[:200],
        action_flag=DELETION,
        change_message=f"Released by force ({which}): {reason}",
    )
