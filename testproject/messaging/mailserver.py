"""The far side of a channel. Only its slowness is made up: the mailbox is a file on this machine."""

import time

from .mbox import Mail, Mbox

#: Seconds that a mail server at the other end of a network takes to answer.
LATENCY = 0.1


class MailServer:
    """Hands out a mailbox page by page, each after the time that a server takes."""

    def __init__(self, mailbox: str) -> None:
        time.sleep(LATENCY)  # connect and log in
        self._mbox = Mbox(mailbox)

    def fetch(self, start: int, count: int) -> list[Mail]:
        time.sleep(LATENCY)
        return list(self._mbox.read(start, count))

    def mark_seen(self, mails: list[Mail]) -> None:
        time.sleep(LATENCY)

    def __enter__(self) -> "MailServer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._mbox.close()
