"""The tutorial that adds a family, followed in a copy of the sources and tests: `make soak PART=family`."""

import shutil

import pytest

from tests.e2e.test_tutorials import ROOT, follow


@pytest.mark.timeout(900)
def test_the_page_does_what_it_says(tmp_path, monkeypatch):
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    follow(ROOT / "docs" / "tutorials" / "add-a-family.md", tmp_path)
