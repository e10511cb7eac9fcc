"""Adapters in every layout with both models: `make soak PART=layouts`."""

import pytest
from tests.ranks.test_adapter_training import (
    LAYOUTS,
    compare,
    corpus,
    families,
    folders,
    pytestmark,
    references,
)

__all__ = ["corpus", "folders", "pytestmark", "references"]


@pytest.mark.parametrize(
    ("method", "family", "ranks", "settings"),
    [(method, family, ranks, settings) for method, ranks, settings in LAYOUTS for family in families(method)],
    ids=str,
)
def test_every_layout_computes_what_peft_does(
    corpus, folders, references, tmp_path, method, family, ranks, settings
):
    compare(corpus, folders, references, tmp_path, method, family, ranks, settings)
