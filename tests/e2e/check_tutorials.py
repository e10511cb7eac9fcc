"""Tutorials that take minutes, followed as test_tutorials.py follows the others: `make soak PART=story`."""

import pytest

from tests.e2e.test_tutorials import LONG, PAGES, blocks, follow


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in LONG], ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page, tmp_path):
    follow(PAGES[0], tmp_path)
    follow(page, tmp_path, done=[step for block in blocks(PAGES[0]) for step in block])
