"""Waiting for a socket."""

from __future__ import annotations

import select


def wait_for(fd: int, seconds: float, *, reading: bool = True, writing: bool = False) -> bool:
    """Wait until the socket can be read or written, as asked for; False after ``seconds``."""
    seconds = max(seconds, 0.0)
    if not hasattr(select, "poll"):  # Windows
        return any(select.select([fd] if reading else [], [fd] if writing else [], [], seconds))
    poll = select.poll()
    poll.register(fd, (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0))
    return bool(poll.poll(min(seconds * 1000, 2**31 - 1)))
