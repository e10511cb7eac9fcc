"""Rows of new tokens in every layout with both models: `make soak PART=layouts`."""

import pytest
from tests.ranks.test_adapter_training import Layouts, compare
from tests.ranks.test_new_rows_training import LAYOUTS, corpus, folders, pytestmark, references

__all__ = ["corpus", "folders", "pytestmark", "references"]


CASES = [
    (method, family, ranks, settings) for method, ranks, settings in LAYOUTS for family in ("llama", "qwen3")
]


@pytest.fixture(scope="module")
def layouts(corpus, folders, tmp_path_factory):
    return Layouts(CASES, corpus, folders, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_trains_new_rows_as_peft_does(layouts, references, case):
    compare(layouts, references, case)
