"""A real Chromium for the tests, driven by Playwright, and the admin for it to look at."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from tests.support.procs import Child
from tests.support.servers import eventually, missing_packages

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 30_000  # for whatever the browser is asked for, in ms
ARGUMENTS = [
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


def program() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def unavailable() -> str | None:
    """Why there is no browser here, or None."""
    if reason := missing_packages("playwright"):
        return reason
    return None if program() else "needs the program chromium (a package of the system)"


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=ARGUMENTS, timeout=60_000)
        try:
            yield browser
        finally:
            browser.close()


class Site:
    """The admin in a process of its own, and what a person does there."""

    def __init__(self, child: Child, browser: Any) -> None:
        self.child, self.browser = child, browser
        port, self.operator_pk = child.expect("port", 40).split()
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/admin/angee_jobs/tasklock/"
        self.complaints: list[str] = []

    def hold(
        self, key: str, *, backend: str = "default", ttl: float = 300, age: float = 0, task: str = "", note: str = ""
    ) -> None:
        self.child.send("hold", "\t".join([backend, str(ttl), str(age), task, note, key]))
        assert self.child.expect("held") == "True"

    def lost(self, key: str) -> bool:
        self.child.send("lost", key)
        return self.child.expect("lost") == "True"

    def free(self) -> None:
        self.child.send("free")
        self.child.expect("freed")

    @contextlib.contextmanager
    def user(self, name: str, **options: Any) -> Iterator[Any]:
        """A window in which `name` has logged in; what the browser complains about is noted."""
        context = self.browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        try:
            page = context.new_page()
            page.set_default_timeout(TIMEOUT)
            page.on("console", self._on_console)
            page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
            page.on("requestfailed", self._on_failed)
            page.goto(f"{self.root}/admin/login/?next=/admin/angee_jobs/tasklock/")
            page.fill("#id_username", name)
            page.fill("#id_password", "secret")
            page.click("input[type=submit]")
            page.wait_for_url(self.url)
            yield page
        finally:
            context.close()

    def _on_failed(self, request: Any) -> None:
        if "ERR_ABORTED" not in (request.failure or ""):  # somebody has clicked on before all was there
            self.complaints.append(f"failed: {request.url} {request.failure}")

    def _on_console(self, message: Any) -> None:
        # The icon is what the browser asks every site for, whatever its pages say.
        if message.type in ("error", "warning") and not message.location["url"].endswith("/favicon.ico"):
            self.complaints.append(f"{message.type}: {message.text} {message.location}")


def fits(page: Any) -> bool:
    """Whether nothing of the page is out of sight to the side, as soon as it has its styles."""
    fit = "document.scrollingElement.scrollWidth <= document.scrollingElement.clientWidth"
    with contextlib.suppress(AssertionError):
        eventually(lambda: page.evaluate(fit))
    return page.evaluate(fit)
