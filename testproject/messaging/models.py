from django.db import models
from django.utils import timezone


class Channel(models.Model):
    """A mailbox that is imported page by page. ``cursor`` counts the messages imported so far."""

    name = models.CharField(max_length=100)
    mailbox = models.TextField(help_text="Path of an mbox file.")
    page_size = models.PositiveIntegerField(default=20)
    cursor = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Message(models.Model):
    """A message of a channel; ``number`` is its place in the mailbox, counted from 0.

    Nothing here is unique, on purpose: a real table should have such a constraint too, but then the demo
    could not show what happens to code that relies on being the only one at work.
    """

    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="messages")
    number = models.PositiveIntegerField()
    message_id = models.TextField(blank=True)
    sender = models.TextField(blank=True)
    subject = models.TextField(blank=True)
    sent_at = models.DateTimeField(null=True, blank=True)
    body = models.TextField(blank=True)

    class Meta:
        indexes = [models.Index(fields=["channel", "number"], name="message_channel_number")]

    def __str__(self) -> str:
        return self.subject or self.message_id or f"message {self.number}"


class SyncRun(models.Model):
    """One import of a channel. Whether one that is marked as running still runs is what its lock knows: `runs.py`."""

    class State(models.TextChoices):
        RUNNING = "running"
        FINISHED = "finished"
        FAILED = "failed"
        STALLED = "stalled"

    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="runs")
    state = models.CharField(max_length=10, choices=State, default=State.RUNNING)
    fencing_token = models.BigIntegerField(null=True)
    started_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.channel} at {self.started_at:%F %T}"

    def end(self, state: State) -> None:
        self.state, self.ended_at = state, timezone.now()
        self.save(update_fields=["state", "ended_at"])
