"""Take a report apart for the tests of what is in it."""

import json
import re
from html.parser import HTMLParser

VOID = {"br", "meta", "link", "hr", "img"}


class Elements(HTMLParser):
    """Collects start tags, and checks that each is closed."""

    def __init__(self, text):
        super().__init__()
        self.found, self._open = [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def inlined(page):
    """Return the JSON that a report has inlined."""
    return json.loads(re.search(r'<script type="application/json" id="runs">(.*?)</script>', page)[1])


def curve(page, metric, axis="step", *, run=0):
    """Return the places and values of a metric in a report."""
    for found in inlined(page)["runs"][run]["curves"]:
        if metric in found["series"]:
            pairs = zip(found["x"][axis], found["series"][metric], strict=True)
            return tuple(zip(*((x, y) for x, y in pairs if y is not None), strict=True))
    return None
