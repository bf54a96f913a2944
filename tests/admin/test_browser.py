"""The held-locks page in a real Chromium, under a strict Content-Security-Policy.

With ANGEE_JOBS_SCREENSHOTS in the environment, the pictures of the documentation are made in that folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import browser as browsers
from tests.support.browser import TIMEOUT, Site, fits
from tests.support.procs import Child
from tests.support.servers import require

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]

ROWS = "#result_list tbody tr"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require(browsers.unavailable())
    with browsers.chromium() as started:
        yield started


@pytest.fixture(scope="module")
def running(databases: None, browser: Any) -> Iterator[Site]:
    with Child("admin_site") as child:
        yield Site(child, browser)
        child.send("end")
        child.wait(20)


@pytest.fixture
def site(running: Site) -> Iterator[Site]:
    running.complaints.clear()
    yield running
    running.free()
    assert running.complaints == [], "the browser has nothing to complain about"


def shows(page: Any, *locks: str) -> None:
    """The page has these rows, at once or as soon as it has followed a link."""
    from playwright.sync_api import expect

    expect(page.locator(f"{ROWS} th bdi:first-child")).to_have_text(list(locks), timeout=TIMEOUT)


def test_list_search_filter_sort(site: Site) -> None:
    site.hold("billing-run", note="nightly")
    site.hold("angee:record:shop.Order:7:invoice", backend="leases")
    with site.user("operator") as page:
        shows(page, "billing-run", "shop.Order 7: invoice")  # the oldest first
        assert "The backend “down” cannot be asked" in page.locator(".errornote").inner_text()
        assert "nightly" in page.locator(ROWS).first.inner_text()

        page.fill("#searchbar", "invoice")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=invoice*")
        shows(page, "shop.Order 7: invoice")
        page.click("text=Clear search and filters")
        shows(page, "billing-run", "shop.Order 7: invoice")

        page.click("#changelist-filter a:has-text('leases')")
        shows(page, "shop.Order 7: invoice")
        page.click("#changelist-filter a:has-text('record')")
        shows(page, "shop.Order 7: invoice")
        page.goto(f"{site.url}?backend=leases&kind=name")
        assert page.locator("text=No held lock matches.").is_visible()
        page.goto(site.url)

        page.click("thead a:has-text('Lock')")
        page.wait_for_url("**o=key*")
        shows(page, "billing-run", "shop.Order 7: invoice")
        assert page.locator("th[aria-sort=ascending]").inner_text().strip() == "LOCK"
        page.click("thead a:has-text('Lock')")
        shows(page, "shop.Order 7: invoice", "billing-run")


def test_link_to_the_record(site: Site) -> None:
    site.hold(f"angee:record:auth.User:{site.operator_pk}:sync")
    with site.user("operator") as page:
        page.click(f"text=user {site.operator_pk}: sync")
        page.wait_for_url(f"**/admin/auth/user/{site.operator_pk}/change/")
        assert page.input_value("#id_username") == "operator"


def test_release_by_force_from_end_to_end(site: Site) -> None:
    for key in ("one", "two", "three"):
        site.hold(key)
    with site.user("operator") as page:
        page.goto(f"{site.url}?o=key&refresh=60")
        page.check("[aria-label='Select one']")
        page.check("[aria-label='Select two']")
        page.click("text=Release selected by force")
        page.wait_for_selector("text=Their holders are not stopped.")
        page.wait_for_load_state()
        assert sorted(page.locator(f"{ROWS} th bdi:first-child").all_inner_texts()) == ["one", "two"]
        page.click("text=No, take me back")
        page.wait_for_url("**/?o=key&refresh=60")
        page.check("[aria-label='Select one']")
        page.check("[aria-label='Select two']")
        page.click("text=Release selected by force")

        page.click("text=Yes, release by force")
        assert page.url.endswith("/release/"), "the browser asks for the reason first"
        page.fill("#reason", "worker-3 was switched off")
        page.click("text=Yes, release by force")
        page.wait_for_url("**/?o=key&refresh=60")
        assert "Released 2 locks by force." in page.locator(".messagelist").inner_text()
        shows(page, "three")
        page.goto(f"{site.root}/admin/")
        assert "angee:name:one" in page.locator("#recent-actions-module").inner_text()
    assert site.lost("one")
    assert site.lost("two")
    assert not site.lost("three")


def test_a_lock_that_is_gone_is_told(site: Site) -> None:
    site.hold("short")
    with site.user("operator") as page:
        page.check("[aria-label='Select short']")
        site.free()
        page.click("text=Release selected by force")
        page.wait_for_selector("text=These holds are over already")
        page.click("text=Back to the held locks")
        page.wait_for_selector("text=0 held locks")


def test_permission_refused(site: Site) -> None:
    site.hold("billing-run")
    with site.user("viewer") as page:
        shows(page, "billing-run")
        assert page.locator("input[type=checkbox]").count() == 0
        assert page.locator("text=Release selected").count() == 0
        token = page.input_value("#changelist-form [name=csrfmiddlewaretoken]")
        lock = '["default", null, "angee:name:billing-run"]'
        form = {"lock": lock, "confirmed": "yes", "reason": "x", "csrfmiddlewaretoken": token}
        answer = page.request.post(f"{site.url}release/", form=form, headers={"Referer": site.url})
        assert answer.status == 403
    with site.user("nobody") as page:
        assert page.request.get(site.url).status == 403
    site.complaints[:] = [each for each in site.complaints if "403" not in each]
    assert not site.lost("billing-run")


def test_with_the_keyboard_alone(site: Site) -> None:
    site.hold("billing-run")
    with site.user("operator") as page:
        page.focus("#searchbar")
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.className") == "action-select":
                break
        page.keyboard.press("Space")
        assert page.is_checked("[aria-label='Select billing-run']")
        for _ in range(60):
            page.keyboard.press("Shift+Tab")
            if page.evaluate("document.activeElement.type") == "submit":
                break
        page.keyboard.press("Enter")
        page.wait_for_selector("#reason")
        page.focus("#reason")
        page.keyboard.type("by keyboard")
        page.keyboard.press("Enter")
        page.wait_for_selector(".messagelist")
        assert "Released 1 lock by force." in page.locator(".messagelist").inner_text()


def test_reload_keeps_selection_focus_and_page(site: Site) -> None:
    site.hold("one")
    site.hold("two")
    with site.user("operator") as page:
        page.goto(f"{site.url}?o=key&q=o")
        page.evaluate("window.untouched = true")
        page.check("[aria-label='Select two']")
        page.focus("[aria-label='Select two']")
        site.hold("four")
        page.locator("#held-locks-reload").dispatch_event("click")
        page.wait_for_selector("[aria-label='Select four']")
        shows(page, "four", "one", "two")
        assert page.is_checked("[aria-label='Select two']")
        assert not page.is_checked("[aria-label='Select one']")
        assert page.evaluate("document.activeElement.ariaLabel") == "Select two"
        assert page.evaluate("window.untouched"), "the page itself stayed"
        page.check("#held-locks-all")
        assert page.locator("input.action-select:checked").count() == 3


def test_reloads_by_itself(site: Site) -> None:
    with site.user("operator") as page:
        page.click("text=Every 5 s")
        page.wait_for_url("**refresh=5*")
        page.evaluate("window.untouched = true")
        site.hold("newcomer")
        page.wait_for_selector("[aria-label='Select newcomer']")
        assert page.evaluate("window.untouched")


def test_without_javascript(site: Site) -> None:
    site.hold("billing-run")
    with site.user("operator", java_script_enabled=False) as page:
        page.goto(f"{site.url}?refresh=5")
        site.hold("newcomer")
        page.wait_for_selector("[aria-label='Select newcomer']")
        page.goto(site.url)  # which does not reload itself and forget what was selected
        page.check("[aria-label='Select billing-run']")
        page.click("text=Release selected by force")
        page.fill("#reason", "no script")
        page.click("text=Yes, release by force")
        assert "Released 1 lock by force." in page.locator(".messagelist").inner_text()
    assert site.lost("billing-run")


def test_a_key_with_script_in_it(site: Site) -> None:
    site.hold("<script>document.title='owned'</script><img src=x onerror=alert(1)>", note="<b>bold</b>")
    with site.user("operator") as page:
        assert "<script>document.title" in page.locator(ROWS).inner_text()
        assert "Held locks" in page.title()
        assert page.locator(f"{ROWS} img, {ROWS} b").count() == 0


@pytest.mark.parametrize("width", [360, 800, 1280])
@pytest.mark.parametrize("language", ["en", "ar"])
def test_narrow_wide_and_right_to_left(site: Site, width: int, language: str) -> None:
    site.hold("x" * 5000, note="y" * 300, task="z" * 300)
    site.hold("angee:record:shop.Order:7:invoice")
    size = {"width": width, "height": 800}
    with site.user("operator", viewport=size, locale=language) as page:
        assert page.evaluate("document.documentElement.dir") == ("rtl" if language == "ar" else "ltr")
        assert fits(page), "nothing is out of sight to the side"
        page.locator(f"{ROWS} input").first.check()
        page.locator("#changelist-form button").click()
        page.wait_for_selector("#reason")
        assert fits(page)


def test_everything_has_a_name_for_screen_readers(site: Site) -> None:
    site.hold("billing-run")
    with site.user("operator") as page:
        for _ in range(2):
            unnamed = page.evaluate(
                """() => [...document.querySelectorAll("#content :is(input:not([type=hidden]), a, button)")]
                .filter((e) => !e.labels?.length && !e.ariaLabel && !e.innerText.trim() && e.type !== "submit")
                .map((e) => e.outerHTML)"""
            )
            assert unnamed == []
            page.check("[aria-label='Select billing-run']")
            page.click("text=Release selected by force")
            page.wait_for_selector("#reason")
            page.go_back()


@pytest.mark.skipif(not os.environ.get("ANGEE_JOBS_SCREENSHOTS"), reason="only for the documentation")
def test_screenshots(site: Site) -> None:
    folder = Path(os.environ["ANGEE_JOBS_SCREENSHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    user = f"angee:record:auth.User:{site.operator_pk}:export"
    task = "messaging.tasks.sync_channel 7f3a09c2"
    site.hold("angee:record:messaging.Channel:42:sync", backend="leases", task=task, age=1046, ttl=60)
    site.hold("angee:record:messaging.Channel:7:sync", backend="leases", task=f"{task[:-4]}44d0", age=95, ttl=30)
    site.hold(user, backend="leases", task="accounts.tasks.export 5d20cc18", age=11040, ttl=3600)
    site.hold("billing-run", backend="leases", note="run_locked bill.sh", age=210, ttl=60)
    site.hold("search-index", backend="default", ttl=120)
    for scheme in ("light", "dark"):
        with site.user("operator", color_scheme=scheme) as page:
            page.screenshot(path=folder / f"held-locks-{scheme}.png")
            page.check("[aria-label='Select billing-run']")
            page.click("text=Release selected by force")
            page.fill("#reason", "worker-3 was switched off")
            page.screenshot(path=folder / f"release-{scheme}.png")
    with site.user("operator", viewport={"width": 390, "height": 844}) as page:
        page.screenshot(path=folder / "held-locks-narrow.png")
    with site.user("operator", locale="ar") as page:
        page.screenshot(path=folder / "held-locks-rtl.png")
