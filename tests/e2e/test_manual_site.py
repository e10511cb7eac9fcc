"""`make docs`: the manual becomes a site that fetches nothing and whose links lead somewhere."""

import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tools import old_addresses

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
LOADED_BY_LINK = {"stylesheet", "icon", "preload", "modulepreload", "manifest", "prefetch"}


class Addresses(HTMLParser):
    """Gathers what a page loads and where its links lead."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.linked, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag == "link" and not LOADED_BY_LINK.isdisjoint((found.get("rel") or "").split()):
            self.loaded.append(found["href"])
        if tag == "a" and found.get("href"):
            self.linked.append(found["href"])
        self.loaded += [found[key] for key in ("src", "srcset", "data", "poster") if found.get(key)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manual")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    old_addresses.write(folder / CONFIG["site_dir"])
    return folder / CONFIG["site_dir"]


def is_elsewhere(address):
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme in ("http", "https")


def test_pages_and_styles_load_nothing_from_another_site(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        assert [one for one in Addresses(page.read_text()).loaded if is_elsewhere(one)] == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]+", style.read_text()) == [], style


def test_links_within_the_site_lead_to_a_file_and_an_anchor(site):
    pages = {page: Addresses(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}
    for page, found in pages.items():
        for address in [*found.linked, *found.loaded]:
            parts = urlsplit(address)
            if parts.netloc or parts.scheme:
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            there = there / "index.html" if there.is_dir() else there
            assert there.is_file(), (page, address)
            if parts.fragment and there in pages:
                assert unquote(parts.fragment) in pages[there].ids | {"__toc"}, (page, address)


def test_every_page_is_in_the_navigation():
    def files(entry):
        if isinstance(entry, dict):
            return [name for value in entry.values() for name in files(value)]
        return [name for one in entry for name in files(one)] if isinstance(entry, list) else [entry]

    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if re.match(r"adr/\d", page)}  # listed by adr/index.md
    assert sorted(files(CONFIG["nav"])) == sorted(pages - decisions)


def test_an_old_address_without_html_leads_to_its_page(site):
    for page in ("how-to/serve", "reference/commands/train", "limits"):
        (found,) = re.findall(r'url=([^"]+)"', (site / page / "index.html").read_text())
        assert (site / page / found).resolve() == (site / f"{page}.html").resolve()
