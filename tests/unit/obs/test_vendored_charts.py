"""The vendored chart library is the published one, with its licence, and our pages make no markup of text."""

import hashlib
import re
from importlib.resources import files

import pytest

VENDOR = files("penstock.obs").joinpath("page", "vendor")
PUBLISHED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of uPlot 1.6.32 on npm."""
PAGES = [
    *(files("penstock.console").joinpath("page").iterdir()),
    *(page for page in files("penstock.obs").joinpath("page").iterdir() if page.is_file()),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_chart_library_is_as_npm_has_it(name):
    assert hashlib.sha256(VENDOR.joinpath(name).read_bytes()).hexdigest() == PUBLISHED[name]
    assert "MIT License" in VENDOR.joinpath("LICENSE").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_makes_no_markup_of_text_and_fetches_nothing_from_outside(page):
    text = page.read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    assert not re.search(r"""["'(]\s*(https?:)?//""", text)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.endswith(".js")], ids=lambda p: p.name)
def test_every_import_of_a_script_is_there(page):
    folders = {".": page.parent, "../charts": files("penstock.obs").joinpath("page")}
    for path in re.findall(r'from "([^"]+)"', page.read_text()):
        folder, _, name = path.rpartition("/")
        assert folders[folder].joinpath(name).is_file(), path
