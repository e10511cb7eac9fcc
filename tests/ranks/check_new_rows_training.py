"""Rows of new tokens in every layout with both models: `make soak PART=layouts`."""

import pytest
from tests.ranks.test_adapter_training import compare
from tests.ranks.test_new_rows_training import LAYOUTS, corpus, folders, pytestmark, references

__all__ = ["corpus", "folders", "pytestmark", "references"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("method", "ranks", "settings"), LAYOUTS, ids=str)
def test_every_layout_trains_new_rows_as_peft_does(
    corpus, folders, references, tmp_path, method, family, ranks, settings
):
    compare(corpus, folders, references, tmp_path, method, family, ranks, settings)
