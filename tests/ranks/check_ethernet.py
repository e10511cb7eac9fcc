"""More levers of `[ethernet]` in each layout than test_ethernet.py has: `make soak PART=ethernet`."""

import pytest
from tests.ranks.test_ethernet import LAYOUTS, assert_equal, batches_of, corpus

__all__ = ["corpus"]

MORE = [(ranks, sections, levers) for ranks, sections, _, levers in LAYOUTS if levers]


@pytest.fixture(scope="module")
def in_layouts(corpus, tmp_path_factory):
    return batches_of(MORE, corpus, tmp_path_factory.mktemp("layouts"))


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
@pytest.mark.parametrize("layout", MORE, ids=str)
def test_no_lever_changes_losses_or_gradients_of_a_layout(in_layouts, layout):
    for found in in_layouts.of(str(layout)):
        assert_equal(found)
