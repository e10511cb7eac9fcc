"""Fill a page's template: its style, its script and a policy that lets no other script run."""

import base64
import hashlib
from html import escape
from importlib.resources import files
from string import Template


def fill(template: str, *, name: str, **parts: str) -> str:
    """Return the page.

    Args:
        template: file in obs/page.
        name: plain text of its title.
        parts: HTML that is escaped already.
    """
    script = _read("report.js")
    digest = hashlib.sha256(script.encode()).digest()
    return Template(_read(template)).substitute(
        parts,
        name=escape(name),
        style=_read("report.css"),
        script=script,
        script_hash=base64.b64encode(digest).decode(),
    )


def _read(name: str) -> str:
    return files("penstock.obs").joinpath("page", name).read_text(encoding="utf-8")
