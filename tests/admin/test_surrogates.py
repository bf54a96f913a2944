"""A key that is a file's name: one that is not UTF-8 has a lone surrogate in it, which no page or log can encode.

Seen: one such hold made the page of held locks a 500 for every operator.
"""

import json
import logging
import os
from urllib.parse import quote

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from angee_jobs.locks import LockKey, LockNotAcquiredError, lock, lock_info
from tests.support.admin_page import (  # noqa: F401  fixtures
    URL,
    held,
    locks,
    logged_in,
    names,
    no_users,
    operator,
    page,
    release,
    targets,
    words,
)
from tests.support.commands import run

NAME = os.fsdecode(b"x\xff")
KEYS = [NAME, LockKey("file", (NAME, "import")), LockKey("record", ("auth.User", NAME, "sync"))]


@pytest.mark.parametrize("key", KEYS, ids=["plain", "key", "record"])
@pytest.mark.parametrize("backend", ["default", "table"])
def test_the_page_shows_finds_and_releases_it(client: Client, key: str | LockKey, backend: str) -> None:
    root = logged_in(superuser=True)
    with held(key, backend=backend, note=NAME), held("other"):
        name = lock(key).key.name
        for each in (client, root):
            html = page(each)
            assert name in names(html)
            assert name in words(html)
            assert r"x\xdcff" in words(html)
        for shown in ("%25ed%25b3%25bf", quote(r"x\xdcff")):
            assert names(page(client, f"?q={shown}")) == [name], "found by what is shown"
        for query in (quote(NAME, errors="surrogateescape"), quote(NAME, errors="surrogatepass"), "%ED%B3%BF"):
            page(client, f"?q={query}")
        [target] = targets(page(client, "?q=%25ed%25b3%25bf"))
        confirmation = client.post(URL + "release/", {"lock": target}).content.decode()
        assert name in words(confirmation)
        assert release(client, target, reason="its host is off") == ["Released 1 lock by force."]
        assert lock_info(key, backend=backend) is None
    assert LogEntry.objects.get().object_repr == name
    assert root.get("/admin/").status_code == 200


@pytest.mark.parametrize("key", KEYS, ids=["plain", "key", "record"])
def test_lists_errors_and_log_lines_can_be_encoded(key: str | LockKey, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "angee_jobs")
    with held(key, note=NAME) as [mine]:
        with pytest.raises(LockNotAcquiredError) as refused, lock(key):
            pass
        text, [row] = run("list_locks"), json.loads(run("list_locks", format="json"))
        assert row["name"] == mine.name
        assert mine.name in text
        run("release_lock", mine.name, reason=NAME)
    assert caplog.records
    for shown in (str(refused.value), text, json.dumps(row, ensure_ascii=False), repr(mine), *caplog.messages):
        shown.encode()
