from django.db import models


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
