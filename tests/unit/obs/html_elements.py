"""Take HTML apart for the tests of what is drawn."""

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
