"""Take HTML apart for the tests of what is drawn."""

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


def charts_of(page):
    """Return the charts that a page embeds, by id."""
    found = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', page)
    return {chart["id"]: chart for chart in json.loads(found[1])["charts"]} if found else {}


def layers_of(page, chart):
    """Return the layers of one chart by name."""
    return {layer["name"]: layer for layer in charts_of(page)[chart]["layers"]}
