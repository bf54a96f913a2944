"""The same import as a task with a lock, and as one without."""

import dataclasses

from django.db import transaction
from django.db.models import F

from angee_jobs.locks import record_lock_key, task_lock

from .mailserver import MailServer
from .models import Channel, Message

try:
    from django.tasks import task
except ModuleNotFoundError:  # before Django 6.0
    from django_tasks import task

REFUSED = "refused"


def import_new_messages(channel_id: int) -> int:
    """Import what the channel has not imported yet, to the end, and return how many messages that were.

    Right, as long as nobody else does it: two who read the same cursor import the same page twice, and
    both of them move the cursor on, across a page that nobody has read. The transaction is no help: each of
    them writes a page and its own step as a whole.
    """
    imported = 0
    channel = Channel.objects.get(pk=channel_id)
    with MailServer(channel.mailbox) as server:
        while page := server.fetch(channel.cursor, channel.page_size):
            with transaction.atomic():
                Message.objects.bulk_create([Message(channel=channel, **dataclasses.asdict(m)) for m in page])
                Channel.objects.filter(pk=channel_id).update(cursor=F("cursor") + len(page))
            server.mark_seen(page)
            imported += len(page)
            channel.refresh_from_db()
    return imported


@task
def sync_channel(channel_id: int) -> int | str:
    with task_lock(record_lock_key("messaging.Channel", channel_id, "sync")) as acquired:
        if not acquired:
            return REFUSED  # somebody else is on it, and will import everything
        return import_new_messages(channel_id)


@task
def sync_channel_without_lock(channel_id: int) -> int:
    return import_new_messages(channel_id)


@task
def report_for_duty() -> None:
    """Does nothing: a worker that has run it is up and takes tasks."""
