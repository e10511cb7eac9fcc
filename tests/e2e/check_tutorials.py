"""The tutorials that test_tutorials.py leaves out, followed likewise: `make soak PART=story`."""

import pytest

from tests.e2e.test_tutorials import LONG, PAGES, first_folder, follow_after_the_first

__all__ = ["first_folder"]


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in LONG], ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page, first_folder, tmp_path):
    follow_after_the_first(page, first_folder, tmp_path)
