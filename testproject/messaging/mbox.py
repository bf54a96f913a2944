"""Read mbox files, anybody's: what is not an mbox is refused, what is odd inside a message is not."""

import dataclasses
import datetime
import email
import mailbox
import os
import re
import shutil
import stat
from collections.abc import Iterator
from email.errors import MessageError
from email.header import decode_header, make_header
from email.message import Message
from email.utils import parsedate_to_datetime

#: "Name: value", or the quoted "From " line of an older envelope, which some programs leave there.
FIRST_HEADER = re.compile(rb"[!-9;-~]+[ \t]*:|>From ")
QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)


class MboxError(Exception):
    """The file cannot be imported; the text is one line that names it and says why."""


@dataclasses.dataclass(frozen=True)
class Mail:
    """What is kept of a message; ``number`` is its place in the mailbox, counted from 0."""

    number: int
    message_id: str
    sender: str
    subject: str
    sent_at: datetime.datetime | None
    body: str


class Mbox:
    """An mbox file, open for reading. It is looked over as a whole before anything is read from it.

    Raises ``MboxError``. ``path`` is the file that is read; ``name`` is what errors call it.
    """

    def __init__(self, path: str, *, name: str = "") -> None:
        self.name = name or path
        try:
            with open(path, "rb") as file:
                start = file.read(5)
            if start and start != b"From ":
                raise MboxError(f"{self.name!r} is not an mbox file: it does not begin with 'From '")
            self._box = mailbox.mbox(path, create=False)
            try:
                self._count = len(self._box)
                for number in range(self._count):
                    self._look_over(number)
            except BaseException:
                self._box.close()
                raise
        except OSError as error:
            raise MboxError(f"cannot read {self.name!r}: {error.strerror or error}") from error

    def _look_over(self, number: int) -> None:
        file = self._box.get_file(number, from_=True)
        envelope, header = file.readline(200), file.readline(200)
        if not FIRST_HEADER.match(header):
            line = envelope.decode("ascii", "replace").strip()
            raise MboxError(
                f"{self.name!r} is not a proper mbox file: no headers follow the line {line[:60]!r}, "
                f"where message {number + 1} begins"
            )

    def __len__(self) -> int:
        return self._count

    def read(self, start: int = 0, count: int | None = None) -> Iterator[Mail]:
        """The messages from ``start`` on, ``count`` of them at the most."""
        stop = self._count if count is None else min(start + count, self._count)
        for number in range(start, stop):
            try:
                mail = parse(number, self._box.get_bytes(number))
            except (OSError, RecursionError) as error:
                raise MboxError(f"cannot read message {number + 1} of {self.name!r}: {error}") from error
            yield mail

    def close(self) -> None:
        self._box.close()

    def __enter__(self) -> "Mbox":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def checked_copy(source: str, target: str) -> int:
    """Copy an mbox, so that mail that arrives meanwhile does no harm, and read it through to the end.

    Returns how many messages it has. ``MboxError`` if one cannot be read, or if there is none.
    """
    try:
        if not stat.S_ISREG(os.stat(source).st_mode):  # a pipe would be waited for
            raise MboxError(f"{source!r} is not a file")
        shutil.copyfile(source, target)
    except OSError as error:
        raise MboxError(f"cannot copy {source!r}: {error.strerror or error}") from error
    with Mbox(target, name=source) as mbox:
        count = sum(1 for _ in mbox.read())
    if not count:
        raise MboxError(f"{source!r} has no messages")
    return count


def parse(number: int, raw: bytes) -> Mail:
    message = email.message_from_bytes(QUOTED_FROM.sub(rb"\1", raw))
    return Mail(
        number=number,
        message_id=header(message, "Message-ID"),
        sender=header(message, "From"),
        subject=header(message, "Subject"),
        sent_at=date(header(message, "Date")),
        body=body(message),
    )


def header(message: Message, name: str) -> str:
    """A header's text: unfolded and decoded, as far as it can be."""
    raw = next((value for key, value in message.raw_items() if key.lower() == name.lower()), "")
    text = raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes that are not ASCII
    try:
        text = str(make_header(decode_header(text)))
    except (MessageError, LookupError, ValueError):  # no base64, an unknown character set, ...
        pass
    return storable(" ".join(text.split()))


def date(text: str) -> datetime.datetime | None:
    try:
        when = parsedate_to_datetime(text)
        if when.tzinfo is None:  # "-0000": in UTC, sent from who knows where
            when = when.replace(tzinfo=datetime.UTC)
        return when.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        return None


def body(message: Message) -> str:
    """The text of the message: its first plain part, or else its first text of any kind."""
    texts = [part for part in message.walk() if part.get_content_maintype() == "text"]
    plain = [part for part in texts if part.get_content_subtype() == "plain"]
    for part in [*plain, *texts][:1]:
        payload = part.get_payload(decode=True) or b""
        try:
            text = payload.decode(part.get_content_charset("utf-8"), "replace")
        except (LookupError, ValueError):
            text = payload.decode("utf-8", "replace")
        return storable(text)
    return ""


def storable(text: str) -> str:
    """Without what databases refuse: NUL and lone surrogates."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")
