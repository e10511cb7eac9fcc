"""What a benchmark sees of a web page and its server: waits, memory, the first curve."""

from io import BytesIO
from pathlib import Path

import numpy as np

from penstock.core import clock

PATIENCE_S = 300
BETWEEN_S = 0.41
"""Between two points of a run that grows: no part of a second, so that a poll meets them at all phases."""


def wait(is_so, what):
    """Wait for something; a second's hundredth between looks."""
    end = clock.monotonic() + PATIENCE_S
    while not is_so():
        if clock.monotonic() > end:
            raise TimeoutError(f"not within {PATIENCE_S} s: {what}")
        clock.sleep(0.01)


def memory_mib(pid):
    """Return the resident memory of a process and its children in MiB."""
    pids, total = [pid], 0
    while pids:
        at = pids.pop()
        try:
            lines = Path(f"/proc/{at}/status").read_text().splitlines()
            pids += map(int, Path(f"/proc/{at}/task/{at}/children").read_text().split())
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)
    return round(total / 1024)


def heap_mib(page):
    """Return the memory of a page's JavaScript in MiB."""
    return round(page.evaluate("performance.memory.usedJSHeapSize") / 2**20, 1)


def new_page(browser, script=None):
    """Return a page of one size for all, patient, with a script that runs before its own."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_S * 1000)
    if script is not None:
        page.add_init_script(path=script)
    return page


def has_curve(picture):
    """Return whether a PNG has coloured pixels, as a curve has; axes and text are grey."""
    from PIL import Image

    pixels = np.asarray(Image.open(BytesIO(picture)).convert("RGB")).astype(int)
    return int((np.ptp(pixels, axis=2) > 25).sum()) > 30


def curve_ms(browser, address, chart, *, choose=None):
    """Open an address in a new page; return the ms to a curve in its chart, and the page's memory.

    Args:
        choose: does what a reader must to see it, given the page; None: nothing.
    """
    page = new_page(browser)
    try:
        begin = clock.monotonic()
        page.goto(address, wait_until="commit")
        if choose is not None:
            choose(page)
        found = page.locator(chart).first
        found.wait_for()
        while True:
            box = found.bounding_box()
            clip = box and {**box, "height": max(min(box["height"], 900 - box["y"]), 1)}
            if box and box["width"] and has_curve(page.screenshot(clip=clip)):
                return 1000 * (clock.monotonic() - begin), heap_mib(page)
            if clock.monotonic() - begin > PATIENCE_S:
                raise TimeoutError(f"no curve in {address}")
    finally:
        page.close()
