"""`manage.py demo` and the example app behind it: reading mbox files, importing them, the command as it is run."""

import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import django
import pytest
from django.db import DatabaseError, connection

from testproject.messaging.demo.report import Outcome, count_messages, render
from testproject.messaging.mbox import Mbox, MboxError, checked_copy
from testproject.messaging.models import Channel, Message
from tests.support.procs import ROOT
from tests.support.servers import eventually, missing_packages, require

pytestmark = pytest.mark.timeout(180)

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


# The command

COLUMNS = ("tasks", "refused", "messages", "twice", "lost")


class Demo:
    """`manage.py demo` as a user starts it: without any of our environment, but for where its files go."""

    def __init__(self, directory: Path, *args: str) -> None:
        self.directory = directory
        strange = re.compile(r"DJANGO_|ANGEE_")
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "demo", *args],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not strange.match(name)}
            | {"TMPDIR": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output = ""

    def read_until(self, start: str) -> str:
        """The rest of the first line that begins like this."""
        for line in self.process.stdout:
            self.output += line
            if line.startswith(start):
                return line.removeprefix(start)
        pytest.fail(f"no line {start!r} in:\n{self.output}\n{self.process.stderr.read()}")

    def workers(self) -> list[int]:
        return [int(pid) for pid in self.read_until("Processes: ").split(", ")]

    def finish(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=100)
        return self.process.returncode, self.output + output, errors

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_demo(tmp_path):
    require(missing_packages("django_tasks_db", "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"))
    with contextlib.ExitStack() as stack:

        def start(*args: str) -> Demo:
            demo = Demo(tmp_path, *args)
            stack.callback(demo.close)
            return demo

        yield start


def is_worker(pid: int) -> bool:
    """Whether it still runs; a dead process that nobody waited for has no command line."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return b"messaging.demo.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False
    command = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, check=False)
    return b"messaging.demo.worker" in command.stdout


def test_demo(start_demo, tmp_path):
    usual = ROOT / "testproject.sqlite3"
    before = usual.stat() if usual.exists() else None
    demo = start_demo()
    pids = demo.workers()
    assert len(set(pids)) == 4
    demo.read_until("without locks:")
    assert all(map(is_worker, pids))
    code, output, errors = demo.finish()
    assert (code, errors) == (0, "")
    rows = re.findall(r"^(without locks|with task_lock) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", output, re.MULTILINE)
    without, locked = ({"label": label} | dict(zip(COLUMNS, map(int, row), strict=True)) for label, *row in rows)
    assert without["label"] == "without locks"
    assert without["tasks"] == locked["tasks"] == 12
    assert without["twice"] > 0
    assert without["refused"] == 0
    assert (locked["twice"], locked["lost"]) == (0, 0)
    assert locked["refused"] > 0
    assert locked["messages"] == 2 * SAMPLE.read_bytes().count(b"\nFrom ") + 2
    assert not any(map(is_worker, pids))
    assert list(tmp_path.iterdir()) == []
    assert (usual.stat() if usual.exists() else None) == before


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_ended_demo_leaves_nothing_running(start_demo, tmp_path, signum, code):
    demo = start_demo()
    pids = demo.workers()
    demo.read_until("without locks:")
    demo.process.send_signal(signum)
    assert demo.finish()[0] == code
    eventually(lambda: not any(map(is_worker, pids)), what="the workers end")
    if signum != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_is_reported(start_demo, tmp_path):
    demo = start_demo()
    pids = demo.workers()
    demo.read_until("without locks:")
    os.kill(pids[2], signal.SIGKILL)
    code, _, errors = demo.finish()
    assert code == 1
    assert errors.startswith(f"CommandError: worker-3 (pid {pids[2]}) died of SIGKILL")
    assert errors.count("\n") == 1
    assert not any(map(is_worker, pids))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"\xff" * 2000, MAIL + b"From here on it is text:\nno headers\n"])
def test_a_bad_mailbox_is_one_line_on_standard_error(start_demo, tmp_path_factory, tmp_path, content):
    path = tmp_path_factory.mktemp("mail") / "box"
    if content is not None:
        path.write_bytes(content)
    code, output, errors = start_demo("--mbox", str(path)).finish()
    assert (code, output) == (1, "")
    assert errors.startswith("CommandError: ")
    assert str(path) in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option", ["--workers=3", "--workers=33", "--channels=0", "--tasks-per-channel=1", "--channels=x"]
)
def test_numbers_that_make_no_demo_are_refused(start_demo, option):
    code, _, errors = start_demo(option).finish()
    assert code == 2
    assert "is not a whole number from" in errors
