"""Chromium, driven by Playwright: what tests of pages share. They skip, and say so, where there is none."""

import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.launched import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)  # a chart of a busy machine takes longer than the 5 s of the default
DEVICES = {
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "color_scheme": "dark"},
    "desktop": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
}


def page_of(browser, device, *, complaints, is_complaint=lambda said: said.type == "error", **options):
    """Return a new page of a device, which adds to `complaints` what it says where it fails."""
    page = browser.new_page(**DEVICES[device], **options)
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda said: complaints.append(said.text) if is_complaint(said) else None)
    page.on("pageerror", lambda error: complaints.append(error.stack or str(error)))
    return page


def check_is_usable(page):
    """Check that nothing is cut off at the sides, and that axe finds nothing."""
    found = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert found[0] <= found[1], "the page scrolls sideways"
    violations = Axe().run(page).response["violations"]
    said = [
        f"{one['id']}: {one['nodes'][0]['html']} {one['nodes'][0]['failureSummary']}" for one in violations
    ]
    assert said == []


def turn(page, *, is_hidden):
    """Let a page be what a tab is that is not in sight; without a window, a browser hides none."""
    page.evaluate(
        """(isHidden) => {
          Object.defineProperty(document, 'hidden', { configurable: true, get: () => isHidden });
          document.dispatchEvent(new Event('visibilitychange'));
        }""",
        is_hidden,
    )


def expect_last_step(page, step):
    """Wait until the curve of the loss ends at a step."""
    plot, said = page.locator("#loss .plot"), page.locator("#loss [role=status]")
    plot.focus()

    def is_last():
        page.keyboard.press("End")
        return f"step {step}:" in said.inner_text()

    wait_until(is_last, f"the curve ends at step {step}")
