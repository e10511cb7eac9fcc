"""Settings of an engine: what is refused before anything is opened."""

import pytest

from penstock.core.errors import UsageError
from penstock.engine.config import EngineConfig

NAN = float("nan")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_sequences": 0}, r"max_sequences must be at least 1 \(got 0\)"),
        ({"max_sequences": 2.5}, r"max_sequences must be a whole number \(got 2.5\)"),
        ({"tokens_per_step": 0}, "tokens_per_step must be at least 1"),
        ({"max_context": "4096"}, "max_context must be a whole number"),
        ({"cache_gib": NAN}, r"cache_gib must be positive \(got nan\). Leave it out to have it computed"),
        ({"cache_gib": "2"}, "cache_gib must be positive"),
        ({"target_itl_ms": 0}, "target_itl_ms must be positive"),
        ({"drafts": None}, r"drafts must be off, ngram, or a folder \(got None\)"),
        ({"adapters": "lora"}, r"adapters must map names to folders \(got 'lora'\)"),
        ({"cache": "int4"}, r"cache must be auto or int8 \(got 'int4'\)"),
        ({"weights": "int8", "activations": "int4"}, r"activations must be stored or int8 \(got 'int4'\)"),
        (
            {"activations": "int8"},
            r"int8 and int4 matrices only \(got 'activations int8 with weights stored'\)",
        ),
        ({"activations": "int8", "weights": "auto"}, "Set weights to int8 or int4, or leave activations out"),
        ({"compile": "yes"}, r"compile must be auto, on or off \(got 'yes'\)"),
    ],
)
def test_settings_that_no_engine_has_are_refused(settings, said):
    with pytest.raises(UsageError, match=said):
        EngineConfig(**settings)
