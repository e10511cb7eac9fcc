"""More levers of `[ethernet]` in each layout than test_ethernet.py has: `make soak PART=ethernet`."""

import pytest
from tests.ranks.test_ethernet import LAYOUTS, compare, corpus

__all__ = ["corpus"]


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
@pytest.mark.parametrize(
    ("ranks", "sections", "levers"),
    [(ranks, sections, levers) for ranks, sections, _, levers in LAYOUTS if levers],
    ids=str,
)
def test_no_lever_changes_losses_or_gradients_of_a_layout(
    corpus, tmp_path, monkeypatch, ranks, sections, levers
):
    compare(corpus, tmp_path, monkeypatch, ranks=ranks, sections=sections, levers=levers)
