"""The text of HTML pages: recognised, and extracted by trafilatura; parts of pages are recognised alone.

A page as it is stored is mostly menus, scripts and tags. trafilatura finds the article in it (Barbaresi,
"Trafilatura: a web scraping library and command-line tool for text discovery and extraction", ACL 2021).
It fetches nothing and runs no script of the page. A text that begins with `<p>` or `<div>` may be part of a
page, or Markdown, whose lines extraction would join: it is left as it is, with a warning.
"""

import re
from typing import TYPE_CHECKING, Any, Literal

from penstock.core.errors import PackageMissing, PenstockError
from penstock.core.packages import Package

if TYPE_CHECKING:
    import trafilatura
else:
    trafilatura = Package("trafilatura", "HTML pages")

HtmlRule = Literal["extract", "keep"]

MAX_PAGE_BYTES = 20_000_000
"""Largest page that is parsed: its tree takes some twenty times as much memory."""

MAX_PAGE_TAGS = 100_000
"""Most tags of a page that is parsed: extraction takes seconds there, and grows with their square."""

_BEFORE = r"\s*(?>(?:<\?xml[^>]*>|<!--(?:(?!-->).)*-->)\s*)*<"
_START = re.compile(rf"{_BEFORE}(?:!doctype\s+html|html|head|body|title|meta)\b", re.I | re.S)
_TAGS = (
    "a address article aside b blockquote br center dd details dl div dt em fieldset figure font footer form "
    "h1 h2 h3 h4 h5 h6 header hr i img li link main nav ol p pre script section small span strong style "
    "table tbody td th thead tr u ul"
)
_PART = re.compile(rf"{_BEFORE}({'|'.join(_TAGS.split())})(?=[\s/>])", re.I | re.S)
_INLINE_TAGS = (
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img input ins kbd label mark q s samp "
    "small span strike strong sub sup time tt u var wbr"
)
_INLINE = set(_INLINE_TAGS.split())
_KEEPING = ("pre", "code", "textarea")
_RUN = re.compile(r"[ \t\n\r\f]+")
_LINE_ENDS = re.compile(r"[ \t]+(?:\n|\Z)")
_SUFFIXES = (".html", ".htm", ".xhtml")


def is_html(text: str, path: str) -> bool:
    """Return True if a document is an HTML page, by its first characters or its file name.

    >>> is_html(" <!DOCTYPE html><p>hi", "a.txt"), is_html("<b>hi</b>", "a.htm.gz"), is_html("a < b", "a.c")
    (True, True, False)
    """
    return is_named_html(path) or _START.match(text, 0, 1024) is not None


def tag_of_part(text: str) -> str | None:
    """Return the tag with which a part of an HTML page begins; None for another text.

    >>> tag_of_part("<div class='nav'><a href='/'>Home</a>"), tag_of_part("<p.x> is a mail address")
    ('div', None)
    """
    found = _PART.match(text, 0, 1024)
    return found[1].lower() if found else None


def is_named_html(path: str) -> bool:
    """Return True if the name of a file says that it is an HTML page."""
    return path.lower().removesuffix(".gz").removesuffix(".zst").endswith(_SUFFIXES)


def text_of_html(page: str) -> str:
    """Return the main text of a page: paragraphs, lists and tables, one a line; "" if it has none.

    White space is what a browser shows: runs are one space, except in `<pre>`, `<code>` and `<textarea>`.

    Raises:
        PackageMissing: trafilatura is not installed.
        ValueError: the page cannot be parsed.
    """
    try:
        tree = trafilatura.load_html(page)
        if tree is not None:
            _collapse_white_space(tree)
        text = trafilatura.extract(page if tree is None else tree, include_comments=False, favor_recall=True)
        return _LINE_ENDS.sub("\n", text or "")
    except PenstockError:
        raise
    except Exception as error:  # of lxml and of trafilatura, for pages made to break them
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _collapse_white_space(tree: Any) -> None:  # Any: lxml's HtmlElement, which has no types
    """Make runs of white space one space, and none at the begin of a block, as a browser does."""
    from lxml import etree  # type: ignore[import-untyped]  # trafilatura's

    kept_in: Any = None
    after_space = True
    for event, element in etree.iterwalk(tree, events=("start", "end", "comment", "pi")):
        if event == "start":
            if kept_in is None and element.tag in _KEEPING:
                kept_in = element
            after_space |= element.tag not in _INLINE
            if kept_in is None:
                element.text, after_space = _collapsed(element.text, after_space=after_space)
            else:
                after_space &= not element.text
            continue
        after_space |= event == "end" and element.tag not in _INLINE
        kept_in = None if element is kept_in else kept_in
        if kept_in is None:
            element.tail, after_space = _collapsed(element.tail, after_space=after_space)


def _collapsed(text: str | None, *, after_space: bool) -> tuple[str | None, bool]:
    """Return a text with single spaces, and True if a space at the begin of the next one is not shown.

    >>> _collapsed(" a \\n\\t b ", after_space=True)
    ('a b ', True)
    """
    if not text:
        return text, after_space
    text = _RUN.sub(" ", text)
    text = text.removeprefix(" ") if after_space else text
    return text, text.endswith(" ") if text else after_space


def check_extractor(path: str) -> None:
    """Refuse HTML pages if trafilatura is not installed.

    Args:
        path: the first page, for the message.

    Raises:
        PackageMissing: with how to install it, and how to do without.
    """
    try:
        _ = trafilatura.extract
    except PackageMissing:
        raise PackageMissing(
            f"{path} is an HTML page, and the package trafilatura, which extracts its text, is not installed",
            fix="pip install 'penstock[html]'. Or leave pages out with --exclude '*.html', or train on their "
            "mark-up with --html keep.",
        ) from None
