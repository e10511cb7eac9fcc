"""The plain values of a small recipe."""

from pathlib import Path
from typing import Any

import pytest

from penstock.testing.corpora import write_corpus


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """Plain values of a recipe over one corpus of 50 token ids."""
    corpus = write_corpus(tmp_path / "c", [[1, 2, 3]] * 40, vocab_size=50)
    return {
        "run": {"dir": "runs/x", "steps": 10},
        "model": {
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "data": {
            "corpora": {"c": {"path": str(corpus)}},
            "sequence_length": 16,
            "global_batch_size": 4,
        },
    }
