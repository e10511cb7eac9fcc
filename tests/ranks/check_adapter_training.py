"""Adapters in every layout and in more of them, with both models: `make soak PART=layouts`."""

import pytest
from tests.ranks.test_adapter_training import (
    LAYOUTS,
    Layouts,
    compare,
    corpus,
    families,
    folders,
    pytestmark,
    references,
)

__all__ = ["corpus", "folders", "pytestmark", "references"]


MORE = [
    ("lora", 4, {"tensor": 4, "shard": 1}),
    ("full", 4, {"shard": 2, "replicate": 2}),
]
CASES = [
    (method, family, ranks, settings)
    for method, ranks, settings in LAYOUTS + MORE
    for family in families(method)
]


@pytest.fixture(scope="module")
def layouts(corpus, folders, tmp_path_factory):
    return Layouts(CASES, corpus, folders, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_computes_what_peft_does(layouts, references, case):
    compare(layouts, references, case)
