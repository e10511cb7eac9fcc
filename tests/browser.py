"""Chromium, driven by Playwright: what tests of pages share. They skip, and say so, where there is none."""

import shutil
from contextlib import contextmanager
from urllib.parse import urljoin

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.launched import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PLAYWRIGHTS = (
    "AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose,HttpsUpgrades,LensOverlay,"
    "HttpsFirstBalancedModeAutoEnable,MediaRouter,PaintHolding,ThirdPartyStoragePartitioning,"
    "AvoidCorsURLLoaderRestartOnRedirect,TcpPortRandomizationWin,OptimizationHints,"
    "NetworkTimeServiceQuerying,AimEnabled,PreconnectToSearch"
)
"""Features that Playwright turns off: of two lists, Chromium takes the last."""
_OF_THE_ADDRESS_BAR = "WebUIOmniboxPopup,WebUIOmniboxAimPopup"
"""Two pages of Chromium's own for each window: 0.7 CPU-s, where a page of the console takes 0.3."""
ARGUMENTS = ["--no-sandbox", f"--disable-features={_PLAYWRIGHTS},{_OF_THE_ADDRESS_BAR}"]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)  # a chart of a busy machine takes longer than the 5 s of the default
LATE_MS = 30
DEVICES = {
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "color_scheme": "dark"},
    "desktop": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
}


_AXE = Axe().axe_script
_VIOLATIONS = "axe.run({ resultTypes: ['violations'] }).then((found) => found.violations)"


class Pages:
    """Pages of a device that tests use one after another: a used page opens in a third of a new one's time.

    A page that is given back has an empty document, no routes, cookies or permissions, no localStorage or
    sessionStorage of the site that it showed, the size and media of the device, and its mouse in the corner.
    The rest stays, as init scripts, clocks and the storage of other sites do: a test that adds such makes a
    page of its own.

    Args:
        device: of DEVICES.
        make: makes a page, by default in a context of its own.
    """

    def __init__(self, browser, device, make=None):
        self._look = DEVICES[device]
        self._make = make or (lambda: browser.new_page(**self._look))
        self._idle, self._lent = [], []

    def take(self):
        """Return a page that is blank."""
        page = self._idle.pop() if self._idle else self._make()
        page.set_default_timeout(PATIENCE_MS)
        self._lent.append(page)
        return page

    def give_back(self):
        """Clear the pages that were taken, but those that a test has closed."""
        while self._lent:
            page = self._lent.pop()
            if not page.is_closed():
                self._clear(page)
                self._idle.append(page)

    def _clear(self, page):
        leave(page)
        if page.url.startswith("http"):  # a file has no storage that the page of another could read
            page.evaluate("localStorage.clear(), sessionStorage.clear()")
        page.unroute_all()
        page.context.clear_cookies()
        page.context.clear_permissions()
        page.mouse.move(0, 0)
        unset = dict.fromkeys(("media", "reduced_motion", "forced_colors", "contrast"), "null")
        page.emulate_media(color_scheme=self._look["color_scheme"], **unset)
        if page.viewport_size != self._look["viewport"]:
            page.set_viewport_size(self._look["viewport"])


def leave(page):
    """Replace a page's document by an empty one, which asks nobody and writes nothing into the storage.

    It has the address of the same site: for any other a browser would start a process. It names an icon, else
    the browser may ask the site for /favicon.ico, and a server that wants a key refuses it.
    """
    if page.url.startswith("http"):
        body = '<link rel="icon" href="data:,">'
        page.route("**/blank", lambda route: route.fulfill(content_type="text/html", body=body))
        page.goto(urljoin(page.url, "/blank"))
    else:
        page.goto("about:blank")


@contextmanager
def listening(page, **listeners):
    """Context manager: a page tells its events to functions, by name of the event.

    Playwright delivers events during a call only. The last one waits a moment, for the events of what the
    test did last.
    """
    for event, listener in listeners.items():
        page.on(event, listener)
    try:
        yield
        if not page.is_closed():
            page.wait_for_timeout(LATE_MS)
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)


def check_is_usable(page):
    """Check that nothing is cut off at the sides, and that axe finds nothing."""
    found = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert found[0] <= found[1], "the page scrolls sideways"
    if not page.evaluate("'axe' in window"):
        page.evaluate(_AXE)
    violations = page.evaluate(_VIOLATIONS)
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
