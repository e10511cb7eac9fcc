"""Check that links of Markdown files lead somewhere, and that files which the sources name under docs/ exist.

Links to other sites are not looked at: this needs no network. Anchors are made of headings as GitHub and
our site make them.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
MENTION = re.compile(r"(?<![\w/.-])(?<!\]\()docs/(?:adr/\d{4}(?![\d-])|[\w/-]+\.md)")
FENCE = re.compile(r"^\s*(```|~~~)")
CODE = re.compile(r"(`+)(?!`)[^\n]*?(?<!`)\1(?!`)")
OTHER_SITE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)")
SOURCES = {".cpp", ".h", ".html", ".js", ".json", ".md", ".py", ".toml"}


def without_fences(text: str) -> str:
    """Return a page with the lines of fenced code left empty.

    >>> without_fences("a\\n```\\nb\\n```\\nc")
    'a\\n\\n\\n\\nc'
    """
    lines, is_code = [], False
    for line in text.splitlines():
        is_fence = FENCE.match(line) is not None
        lines.append("" if is_code or is_fence else line)
        is_code ^= is_fence
    return "\n".join(lines)


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading.

    >>> anchor_of("What `--set` does, in [short](x.md)")
    'what---set-does-in-short'
    """
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page: a heading that comes again has a number behind it."""
    text = without_fences(page.read_text())
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    times: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", text, re.MULTILINE):
        name = anchor_of(heading)
        found.add(f"{name}-{times[name]}" if times[name] else name)
        times[name] += 1
    return frozenset(found)


def broken_links(page: Path, manual: Path) -> Iterator[str]:
    """Yield a message for each link of a Markdown page that leads to no file or no heading.

    Args:
        manual: folder whose pages become a site and link to one another only.
    """
    text = CODE.sub("", without_fences(page.read_text()))
    for link in LINK.finditer(text):
        target = link[1]
        if OTHER_SITE.match(target):
            continue
        where = f"{page}:{text.count(chr(10), 0, link.start()) + 1}: {target}"
        path, _, anchor = target.partition("#")
        there = (page.parent / unquote(path)).resolve() if path else page
        if not there.exists():
            yield f"{where}: there is no such file"
        elif page.is_relative_to(manual) and not there.is_relative_to(manual):
            yield f"{where}: it is not in the site: write its path as code, without a link"
        elif anchor and (there.suffix != ".md" or anchor not in anchors(there)):
            yield f"{where}: {there.name} has no heading of that anchor"


def broken_mentions(source: Path, root: Path) -> Iterator[str]:
    """Yield a message for each page of docs/ that a file names and that is not there."""
    if "docs/" not in (text := source.read_text(errors="replace")):
        return
    for number, line in enumerate(text.splitlines(), start=1):
        for name in MENTION.findall(line):
            pattern = name if name.endswith(".md") else f"{name}-*.md"
            if not any(root.glob(pattern)):
                yield f"{source}:{number}: {name}: there is no such page"


def broken(root: Path, files: list[Path]) -> list[str]:
    """Return a message for each broken link or mention in the files of a checkout."""
    pages = [path for path in files if path.suffix == ".md" and path.is_file()]
    links = [said for page in pages for said in broken_links(page, root / "docs")]
    named = [said for path in files if path.is_file() for said in broken_mentions(path, root)]
    return sorted({said.replace(f"{root}/", "") for said in [*links, *named]})


def tracked(root: Path) -> list[Path]:
    """Return the files of a checkout that may hold links: tracked ones and new ones, without results."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return [root / name for name in names if Path(name).suffix in SOURCES and "/results/" not in name]


def main() -> int:
    """Print what is broken; 1 if anything is."""
    said = broken(ROOT, tracked(ROOT))
    for line in said:
        print(line)
    if said:
        print(f"{len(said)} broken links: correct the path or the anchor, or write the page")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
