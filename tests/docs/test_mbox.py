"""The example app behind the demo: reading mbox files, refusing bad ones, importing, counting."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import DatabaseError, connection

from testproject.messaging.demo.report import Outcome, count_messages, render
from testproject.messaging.mbox import Mbox, MboxError, checked_copy
from testproject.messaging.models import Channel, Message
from tests.support.procs import ROOT

SAMPLE = ROOT / "testproject/messaging/sample.mbox"

SENT = datetime.datetime(2024, 3, 5, 13, 19, 59, tzinfo=datetime.UTC)


MAIL = b"""\
From someone@quay.example Tue Mar  5 13:19:59 2024
Message-ID:
 <1@quay.example>
From: =?utf-8?b?WXVraSDnlLDkuK0=?= <yuki@quay.example>
Subject: =?iso-8859-1?q?Caf=E9?= =?iso-8859-1?q?_au_lait?=
 and more
Date: Tue, 05 Mar 2024 14:19:59 +0100

>From the bridge it looks higher.
>>From is quoted twice.

"""


def mails(directory: Path, content: bytes) -> list:
    path = directory / "box"
    path.write_bytes(content)
    with Mbox(str(path)) as mbox:
        return list(mbox.read())


def refusal(path: Path) -> str:
    """What the demo would say of a file that it cannot import."""
    with pytest.raises(MboxError) as caught:
        checked_copy(str(path), str(path.with_name("copy")))
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


# Reading


def test_folded_and_encoded_headers_and_quoted_lines(tmp_path):
    [mail] = mails(tmp_path, MAIL)
    assert mail.message_id == "<1@quay.example>"
    assert mail.sender == "Yuki 田中 <yuki@quay.example>"
    assert mail.subject == "Café au lait and more"
    assert mail.sent_at == SENT
    assert mail.body.splitlines()[:2] == ["From the bridge it looks higher.", ">From is quoted twice."]


def test_mail_with_windows_line_ends(tmp_path):
    first, second = mails(tmp_path, (MAIL + MAIL).replace(b"\n", b"\r\n"))
    assert first.subject == second.subject == "Café au lait and more"


def test_the_plain_part_is_the_body(tmp_path):
    head, _, _ = MAIL.partition(b"\n\n")
    parts = (
        b'\nMIME-Version: 1.0\nContent-Type: multipart/alternative; boundary="="\n\n'
        b"--=\nContent-Type: text/html\n\n<b>no</b>\n"
        b"--=\nContent-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable\n\n"
        b"Gr=FC=DFe\n--=--\n"
    )
    [mail] = mails(tmp_path, head + parts)
    assert mail.body.strip() == "Grüße"


@pytest.mark.parametrize(
    ("header", "field", "value"),
    [
        (b"Subject: =?no-such-charset?q?abc?=", "subject", "=?no-such-charset?q?abc?="),
        (b"Subject: =?\xff?q?abc?=", "subject", "=?\N{REPLACEMENT CHARACTER}?q?abc?="),
        (b"Subject: caf\xc3\xa9", "subject", "café"),
        (b"Subject: caf\xe9", "subject", "caf\N{REPLACEMENT CHARACTER}"),
        (b"Subject: a\0b", "subject", "ab"),
        (b"Subject: =?utf-16-le?b?ANg=?=", "subject", "=?utf-16-le?b?ANg=?="),
        (b"Date: the day before yesterday", "sent_at", None),
        (b"Date: Fri, 31 Dec 9999 23:59:59 -2300", "sent_at", None),
        (b"Date: Tue, 05 Mar 2024 13:19:59 -0000", "sent_at", SENT),
        (b"Content-Type: text/plain; charset=undefined", "body", "text\n"),
        (b"Content-Type: multipart/mixed", "body", ""),
    ],
)
def test_odd_messages_are_read_as_far_as_they_can_be(tmp_path, header, field, value):
    [mail] = mails(tmp_path, b"From a Tue Mar  5 13:19:59 2024\n" + header + b"\n\ntext\n")
    assert getattr(mail, field) == value


def test_read_by_pages(tmp_path):
    (tmp_path / "box").write_bytes(MAIL * 5)
    with Mbox(str(tmp_path / "box")) as mbox:
        assert len(mbox) == 5
        assert [mail.number for mail in mbox.read(0, 2)] == [0, 1]
        assert [mail.number for mail in mbox.read(4, 2)] == [4]
        assert list(mbox.read(5, 2)) == list(mbox.read(99, 2)) == []


def test_the_sample_has_what_real_mailboxes_have():
    text = SAMPLE.read_text()
    for feature in ("\n>From ", "=?utf-8?b?", "=?iso-8859-1?q?", "multipart/alternative", "message/rfc822", "\n\t"):
        assert feature in text
    with Mbox(str(SAMPLE)) as mbox:
        found = list(mbox.read())
    assert len(found) > 100
    assert len({mail.message_id for mail in found}) == len(found)
    assert all(mail.sender and mail.subject and mail.sent_at and mail.body for mail in found)
    assert not any("=?" in mail.sender + mail.subject for mail in found)


# Refusing


def test_an_empty_file_has_no_messages(tmp_path):
    (tmp_path / "box").touch()
    assert mails(tmp_path, b"") == []
    assert "has no messages" in refusal(tmp_path / "box")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"To whom it may concern\n", "not an mbox file"),
        (b"\n" + MAIL, "not an mbox file"),
        (bytes(range(256)) * 40, "not an mbox file"),
        (b"\x1f\x8b\x08" + MAIL, "not an mbox file"),
        (b"From a Tue Mar  5 13:19:59 2024\n", "message 1 begins"),
        (b"From \xff\xfe\0\n\0\x01\x02", "message 1 begins"),
        (MAIL * 3 + b"From here on it is text:\nno headers\n", "message 4 begins"),
        (MAIL + b"From \0" + bytes(range(256)) * 9, "message 2 begins"),
    ],
)
def test_what_is_no_mbox_is_refused(tmp_path, content, complaint):
    with pytest.raises(MboxError, match=complaint):
        mails(tmp_path, content)
    assert complaint in refusal(tmp_path / "box")


def test_a_message_nested_too_deeply_is_refused(tmp_path):
    levels = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(3000))
    (tmp_path / "box").write_bytes(MAIL + b"From a Tue Mar  5 13:19:59 2024\n" + levels)
    assert "message 2" in refusal(tmp_path / "box")


def test_what_cannot_be_opened_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "missing")
    (tmp_path / "directory").mkdir()
    assert "not a file" in refusal(tmp_path / "directory")
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refusal(tmp_path / "pipe")
    with pytest.raises(MboxError, match="No such file"):
        Mbox(str(tmp_path / "missing"))
    with pytest.raises(MboxError, match="directory"):
        Mbox(str(tmp_path))


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Root may read everything: be somebody else for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_an_unreadable_file_is_refused(tmp_path):
    path = tmp_path / "box"
    path.write_bytes(MAIL)
    path.chmod(0)
    with nobody():
        assert "Permission denied" in refusal(path)
        with pytest.raises(MboxError, match="Permission denied"):
            Mbox(str(path))


# Importing


@pytest.fixture
def channel(tmp_path):
    (tmp_path / "box").write_bytes(MAIL * 5)
    channel = Channel.objects.create(name="test", mailbox=str(tmp_path / "box"), page_size=2)
    yield channel
    channel.delete()


@pytest.fixture
def tasks(monkeypatch):
    module = pytest.importorskip("testproject.messaging.tasks", reason="needs a tasks framework")
    monkeypatch.setattr("testproject.messaging.mailserver.LATENCY", 0)
    return module


def test_one_import_at_a_time_is_right(channel, tasks):
    assert tasks.import_new_messages(channel.pk) == 5
    assert tasks.import_new_messages(channel.pk) == 0
    channel.refresh_from_db()
    assert channel.cursor == 5
    assert [message.number for message in channel.messages.order_by("number")] == [0, 1, 2, 3, 4]
    assert channel.messages.first().subject == "Café au lait and more"


def test_nothing_is_imported_from_a_malformed_mailbox(channel, tasks):
    with Path(channel.mailbox).open("ab") as box:
        box.write(b"From here on it is text:\nno headers\n")
    with pytest.raises(MboxError):
        tasks.import_new_messages(channel.pk)
    channel.refresh_from_db()
    assert (channel.cursor, channel.messages.count()) == (0, 0)


def test_a_page_is_written_with_its_step_of_the_cursor_or_not_at_all(channel, tasks):
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TEMPORARY TRIGGER refuse BEFORE UPDATE OF cursor ON messaging_channel WHEN NEW.cursor > 2 "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
        with pytest.raises(DatabaseError, match="refused"):
            tasks.import_new_messages(channel.pk)
        cursor.execute("DROP TRIGGER refuse")
    channel.refresh_from_db()
    assert (channel.cursor, channel.messages.count()) == (2, 2)
    assert tasks.import_new_messages(channel.pk) == 3


def test_count_of_copies_and_of_what_is_missing(channel):
    other = Channel.objects.create(name="other", mailbox="")
    copies = [(channel, 0), (channel, 1), (channel, 1), (channel, 1), (channel, 2), (channel, 2), (other, 0)]
    Message.objects.bulk_create(Message(channel=owner, number=number) for owner, number in copies)
    try:
        assert count_messages([channel], 5) == (2, 2)
        assert count_messages([channel, other], 10) == (2, 6)
    finally:
        other.delete()


def test_table():
    outcomes = [Outcome("without locks", 12, 0, 342, 99, 243), Outcome("with", 12, 10, 342, 0, 0)]
    assert render(outcomes).split("\n") == [
        "               tasks run  refused  messages  imported twice  lost",
        "-----------------------------------------------------------------",
        "without locks         12        0       342              99   243",
        "with                  12       10       342               0     0",
    ]
