"""What a dashboard needs: runs that it can tell from those whose process died."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from django.utils import timezone

from angee_jobs.locks import LockInfo, lock_info, record_lock_key, task_lock, task_locks_are_cross_process

from .models import SyncRun


def sync_key(channel_id: int):
    return record_lock_key("messaging.Channel", channel_id, "sync")


@contextlib.contextmanager
def recorded_run(channel_id: int) -> Iterator[SyncRun | None]:
    """Sync under the channel's lock, and write down when and how it went; None if somebody else is on it.

    The row says "running" only while the lock is held: it is written after the lock was taken, and changed before the
    lock is given up. If the process dies, the row stays as it is, and the lock comes free.
    """
    with task_lock(sync_key(channel_id)) as acquired:
        if not acquired:
            yield None
            return
        token = lock_info(sync_key(channel_id)).fencing_token  # our own: nobody else holds it now
        run = SyncRun.objects.create(channel_id=channel_id, fencing_token=token)
        try:
            yield run
        except BaseException:
            run.end(SyncRun.State.FAILED)
            raise
        run.end(SyncRun.State.FINISHED)


def is_stalled(run: SyncRun) -> bool | None:
    """Whether ``run`` is marked as running and nobody runs it any more; None where that cannot be told.

    The fencing token tells this run's hold from that of a later run of the same channel.
    """
    if run.state != SyncRun.State.RUNNING:
        return False
    if not task_locks_are_cross_process():
        return None  # the worker's locks cannot be seen from here
    if _holds(run, lock_info(sync_key(run.channel_id))):
        return False
    run.refresh_from_db()  # it may have ended between the look at the row and the look at the lock
    return run.state == SyncRun.State.RUNNING


def _holds(run: SyncRun, info: LockInfo | None) -> bool:
    return info is not None and info.fencing_token == run.fencing_token


def mark_stalled(runs: Iterable[SyncRun]) -> int:
    """End the stalled ones among ``runs``, so that they do not look as if they went on; how many that were."""
    count = 0
    for run in runs:
        if is_stalled(run):
            count += SyncRun.objects.filter(pk=run.pk, state=SyncRun.State.RUNNING).update(
                state=SyncRun.State.STALLED, ended_at=timezone.now()
            )
    return count
