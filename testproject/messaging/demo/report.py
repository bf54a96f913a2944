"""What a run did, read from the database, and the table of the runs."""

import dataclasses
from collections.abc import Sequence

from django.db.models import Count

from ..models import Channel, Message


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Counts of one run. ``twice``: messages imported more than once; ``lost``: messages never imported."""

    label: str
    tasks: int
    refused: int
    messages: int
    twice: int
    lost: int


def count_messages(channels: Sequence[Channel], expected: int) -> tuple[int, int]:
    """How many of the ``expected`` messages of the channels were imported twice, and how many were lost."""
    copies = (
        Message.objects.filter(channel__in=channels)
        .values("channel", "number")
        .annotate(copies=Count("pk"))
        .values_list("copies", flat=True)
    )
    return sum(n > 1 for n in copies), expected - len(copies)


def render(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table of plain text, numbers to the right."""
    rows = [("", "tasks run", "refused", "messages", "imported twice", "lost")]
    rows += [tuple(str(value) for value in dataclasses.astuple(outcome)) for outcome in outcomes]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)
