"""The page of held locks in the admin: what it shows, and finding something on it."""

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client, override_settings

from angee_jobs.admin import listing as heldlocks
from angee_jobs.admin.query import ORDERS
from angee_jobs.locks import LockKey, lock_backends, lock_info, record_lock_key
from angee_jobs.locks.errors import LockBackendError
from tests.support.admin_page import (  # noqa: F401  fixtures
    LOCKS,
    URL,
    BrokenBackend,
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
from tests.support.procs import stopwatch

# What it shows


def test_all_that_is_known_of_a_hold(client: Client) -> None:
    elapsed = stopwatch()
    with held("billing-run", note="by hand", ttl=20) as [billing]:
        html = page(client)
    took = elapsed()
    text = words(html)
    assert "billing-run" in text and "by hand" in text and "angee:name:billing-run" in text
    info = billing.fencing_token
    assert str(info) in text
    [left], [age] = re.findall(r"in (\d+) s", text), re.findall(r"(\d+) s ago", text)
    assert 19 - took < int(left) <= 20 and int(age) <= took
    assert "1 held lock" in text


def test_owner_ids_are_nowhere(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with held("secret-run", ttl=20) as [first], held("table-run", backend="table") as [second]:
        html = page(client)
        confirmation = client.post(URL + "release/", {"lock": targets(html)}).content.decode()
        release(client, *targets(html))
        owners = [first.owner_id, second.owner_id]
        for shown in (html, confirmation, caplog.text, repr(first), repr(first._hold), repr(lock_info("secret-run"))):
            for owner in owners:
                assert owner and owner not in shown
        assert not any(owner in str(vars(entry)) for entry in LogEntry.objects.all() for owner in owners)


def test_record_key_links_to_its_record(client: Client) -> None:
    root = logged_in(superuser=True)
    with held(record_lock_key("auth.User", 7, "sync"), record_lock_key("shop.Order", "A/7", "invoice")):
        html = page(root)
        assert 'href="/admin/auth/user/7/change/"' in html
        assert "user 7: sync" in words(html)
        assert "shop.Order A/7: invoice" in words(html)
        assert "/admin/auth/user/7/change/" not in page(client), "who may not see the record gets no link"


def test_what_is_unknown_is_a_dash(client: Client) -> None:
    with held("hand-made"):
        operations = lock_backends.operations("default")
        [[lease]] = operations._leases.values()  # type: ignore[attr-defined]
        lease.holder = "not JSON"
        assert 'aria-label="unknown">\N{EN DASH}<' in page(client)


def test_a_foreign_name_in_the_storage(client: Client) -> None:
    operations = lock_backends.operations("default")
    for name in ("no lock's name", "angee:name:%zz", ""):
        operations.acquire(name, "owner", 20, "{}", float("inf"))
    html = page(client)
    assert "no lock's name" in words(html)
    assert release(client, targets(html)[0]) == ["What was selected is not from this page, or its backend is gone."]


def test_a_key_with_script_in_it(client: Client) -> None:
    with held('<script>alert("1")</script>', note="<b>bold</b>"):
        html = page(client)
        confirmation = client.post(URL + "release/", {"lock": targets(html)}).content.decode()
    for shown in (html, confirmation):
        assert "<script>alert" not in shown and "<b>bold" not in shown
        assert "&lt;script&gt;alert" in shown


def test_a_key_of_ten_thousand_characters(client: Client) -> None:
    key = "é:" * 5000
    with held(key):
        html = page(client)
        assert "The whole key" in html
        assert names(html) == [LockKey("name", (key,)).name]
        assert release(client, *targets(html)) == ["Released 1 lock by force."]
        assert lock_info(key) is None


def test_nothing_held(client: Client) -> None:
    assert "No lock is held." in page(client)
    with held("something"):
        assert "No held lock matches." in page(client, "?q=other")


# Finding


def test_search_filter_and_sort(client: Client) -> None:
    with (
        held("alpha", note="Zürich"),
        held("beta", backend="table"),
        held(record_lock_key("shop.Order", 1, "in:voice")),
    ):
        record = record_lock_key("shop.Order", 1, "in:voice").name
        alpha, beta = "angee:name:alpha", "angee:name:beta"
        assert names(page(client, "?o=key")) == [alpha, beta, record]
        assert names(page(client, "?o=-key")) == [record, beta, alpha]
        assert names(page(client)) == [alpha, beta, record], "the oldest first"
        assert names(page(client, "?o=-since")) == [record, beta, alpha]
        assert names(page(client, "?o=-token")) == [record, beta, alpha]
        assert names(page(client, "?backend=table")) == [beta]
        assert names(page(client, "?kind=record")) == [record]
        assert names(page(client, "?q=ALPH")) == [alpha]
        assert names(page(client, "?q=z%C3%BCrich")) == [alpha]
        assert names(page(client, "?q=in:voice")) == [record]
        assert names(page(client, "?q=order+1")) == [record]
        assert names(page(client, "?q=order+beta")) == []
        assert names(page(client, "?q=host")) == [], "searches what is shown, not how it is stored"
        for nonsense in ("?o=nothing&p=x", "?p=-1", "?p=999999999", "?refresh=1", "?o=--key", "?p=٣"):
            assert names(page(client, nonsense)) == [alpha, beta, record]
        assert names(page(client, "?kind=none")) == []


def test_every_order_copes_with_what_is_unknown(client: Client) -> None:
    with held("alpha"), held("beta"):
        operations: Any = lock_backends.operations("default")
        original = operations._record

        def record(name: str, lease: Any) -> Any:
            found = original(name, lease)
            if name.endswith("alpha"):
                found.acquired_at = found.expires_at = found.fencing_token = found.holder = None
            return found

        operations._record = record
        for order in ORDERS:
            assert len(names(page(client, f"?o={order}"))) == 2
            assert len(names(page(client, f"?o=-{order}"))) == 2
        for order in ("since", "token", "holder"):
            assert names(page(client, f"?o={order}"))[-1] == names(page(client, f"?o=-{order}"))[-1], "unknown is last"


def test_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heldlocks, "PAGE_ROWS", 3)
    with held(*(f"run-{number:02}" for number in range(10))):
        first = page(client, "?o=key&q=run")
        assert [name[-2:] for name in names(first)] == ["00", "01", "02"]
        assert "?q=run&amp;o=key&amp;p=4" in first
        assert [name[-2:] for name in names(page(client, "?o=key&p=4"))] == ["09"]
        assert [name[-2:] for name in names(page(client, "?o=key&p=40"))] == ["09"], "the last one"
        assert "10 held locks" in words(first)


def test_reload_keeps_the_place(client: Client) -> None:
    html = page(client, "?q=a&o=-key&backend=table&refresh=15")
    assert '<noscript><meta http-equiv="refresh" content="15"></noscript>' in html
    here = "?q=a&amp;backend=table&amp;o=-key&amp;refresh=15"
    assert f'href="{here}" id="held-locks-reload"' in html and f'name="back" value="{here}"' in html
    assert "http-equiv" not in page(client)


def test_no_inline_script_or_style(client: Client) -> None:
    with held("billing-run"):
        html = page(client, "?refresh=5")
        html += client.post(URL + "release/", {"lock": targets(html)}).content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    assert not re.search(r"<script(?![^>]*\ssrc=)", html)
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", html)


# A backend that cannot be asked


def test_error_of_a_backend_in_its_place(client: Client) -> None:
    with held("billing-run"):
        BrokenBackend.error = LockBackendError("The server is down")
        html = page(client)
        assert "The backend “broken” cannot be asked: The server is down" in html
        assert names(html) == ["angee:name:billing-run"], "the others still show"
        assert "cannot be asked" not in page(client, "?backend=default").split("held-locks-list")[1].split("</form>")[0]


def test_unexpected_error_shows_no_text(client: Client) -> None:
    BrokenBackend.error = RuntimeError("redis://user:hunter2@host")
    html = page(client)
    assert "RuntimeError; the log says more" in html and "hunter2" not in html


def test_backends_that_tell_nothing_or_cannot_be_made(client: Client) -> None:
    odd = LOCKS | {
        "third": {"BACKEND": "tests.support.admin_page.TellsNothing"},
        "wrong": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "nowhere"}},
    }
    with override_settings(ANGEE_JOBS_LOCKS=odd):
        text = words(page(client))
        assert "does not tell who holds a lock" in text and "nowhere" in text
    with override_settings(ANGEE_JOBS_LOCKS="nonsense"):
        assert "must be a dictionary" in words(page(client))


def test_a_backend_with_too_many_holds_is_cut_short(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heldlocks, "LOOK_EVERY", 2)
    monkeypatch.setattr(heldlocks, "PAGE_SECONDS", 0.0)
    with held(*(f"run-{number}" for number in range(5))):
        text = words(page(client))
    assert "“default” has more locks than could be read in time: 2 locks were looked at" in text
