"""One run of the demo: queue the sync tasks of some channels, wait for the workers, count the messages."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from django.db import transaction
from django.db.models import QuerySet
from django_tasks_db.models import DBTaskResult

from ..models import Channel, Message
from ..tasks import REFUSED, report_for_duty
from .report import Outcome, count_messages
from .workers import Worker

#: A mailbox is fetched in about this many pages, however large it is: a sync takes some seconds.
PAGES = 20
#: Seconds without any progress after which a run is given up.
PATIENCE = 60
#: Seconds between two looks at how far the workers are.
INTERVAL = 0.1


class RunFailed(Exception):
    """A run did not come to its end; the text is one line that says why."""


class Show(Protocol):
    def __call__(self, text: str, *, done: bool) -> None:
        """Show how far a run is; ``done`` with the last text of a run."""


class Demo:
    """What all runs have in common: a checked mailbox with ``count`` messages, the workers, the load."""

    def __init__(
        self, mailbox: str, count: int, *, channels: int, tasks_per_channel: int, workers: Sequence[Worker], show: Show
    ) -> None:
        self.mailbox = mailbox
        self.count = count
        self.channels = channels
        self.tasks_per_channel = tasks_per_channel
        self.workers = workers
        self.show = show

    def wait_for_workers(self) -> None:
        """Return when all workers take tasks, so that none of them comes too late to get in another's way."""
        for worker in self.workers:
            report_for_duty.using(queue_name=worker.queue).enqueue()
        self._wait_for(report_for_duty, len(self.workers), [], "db_worker processes", "ready")

    def run(self, label: str, task: Any) -> Outcome:
        with transaction.atomic():
            page_size = -(-self.count // PAGES)
            channels = [
                Channel.objects.create(name=f"channel {n}, {label}", mailbox=self.mailbox, page_size=page_size)
                for n in range(1, self.channels + 1)
            ]
            for channel in channels:
                for _ in range(self.tasks_per_channel):
                    task.enqueue(channel.pk)
        tasks, messages = self.channels * self.tasks_per_channel, self.channels * self.count
        results = self._wait_for(task, tasks, channels, label, "tasks done")
        refused = sum(value == REFUSED for value in results.values_list("return_value", flat=True))
        twice, lost = count_messages(channels, messages)
        return Outcome(label, tasks, refused, messages, twice, lost)

    def _wait_for(
        self, task: Any, total: int, channels: Sequence[Channel], label: str, done: str
    ) -> QuerySet[DBTaskResult]:
        results = DBTaskResult.objects.filter(task_path=task.module_path)
        before, since = None, time.monotonic()
        while True:
            for worker in self.workers:
                worker.check()
            states = Counter(results.values_list("status", flat=True))
            if states["FAILED"]:
                error = results.failed().first().traceback.strip().rpartition("\n")[2]
                raise RunFailed(f"{label}: {states['FAILED']} of {total} tasks failed: {error}")
            written = Message.objects.filter(channel__in=channels).count()
            text = f"{label}: {states['SUCCESSFUL']} of {total} {done}"
            if channels:
                text += f", {written} messages written"
            over = states["SUCCESSFUL"] == total
            self.show(text, done=over)
            if over:
                return results
            if (states, written) != before:
                before, since = (states, written), time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                raise RunFailed(f"{text}, and no progress for {PATIENCE} s")
            time.sleep(INTERVAL)
