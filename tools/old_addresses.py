"""Old addresses of the manual's pages, without `.html`: a page at each that leads to the new one.

    python -m tools.old_addresses build/site

`how-to/serve/index.html` answers at `how-to/serve` and `how-to/serve/` of any server of files.
"""

import sys
from pathlib import Path

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<meta http-equiv="refresh" content="0; url={to}"><link rel="canonical" href="{to}"></head>
<body><a href="{to}">This page has moved.</a></body></html>
"""


def write(site: Path) -> int:
    """Write the pages of a built site's old addresses; return their number."""
    pages = [page for page in site.rglob("*.html") if page.name not in ("index.html", "404.html")]
    for page in pages:
        folder = page.with_suffix("")
        folder.mkdir(exist_ok=True)
        (folder / "index.html").write_text(_PAGE.format(to=f"../{page.name}"), encoding="utf-8")
    return len(pages)


if __name__ == "__main__":
    print(f"{write(Path(sys.argv[1]))} old addresses lead on")
