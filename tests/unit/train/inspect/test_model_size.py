"""The room that the console gives the cache of a checkpoint holds a context."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.engine.model_runner.capacity import num_blocks_for
from penstock.engine.scheduling.groups import blocks_of, cache_groups, rows_of
from penstock.train.inspect import run_questions
from tests.families import small_llama

BLOCK_SIZE, CONTEXT = 16, 4096
OF_LAYER = 2 * 4  # keys and values in float32


@pytest.mark.parametrize("window", [CONTEXT - 1, 64])
def test_a_context_fits_where_groups_have_unused_rows(window, monkeypatch):
    kinds = ("full_attention",) * 8 + ("sliding_attention",) * 9
    model = small_llama(
        num_hidden_layers=17,
        model_type="qwen3",
        sliding_window=window,
        layer_types=kinds,
        max_position_embeddings=CONTEXT,
    )
    meta = SimpleNamespace(adapter=None, model=model)
    saved = SimpleNamespace(index=lambda: SimpleNamespace(meta=meta))
    monkeypatch.setattr(run_questions, "find", lambda *_, **__: saved)
    size = run_questions.model_size(Path("run"), step=1)
    groups = cache_groups(model.windows, context=CONTEXT)
    heads = model.key_value_heads * model.size_of_head
    assert size["token_bytes"] == OF_LAYER * heads * 18  # two groups of 9
    num_blocks_for(  # which raises if no context fits
        size["token_bytes"] * (CONTEXT + BLOCK_SIZE),
        block_bytes=OF_LAYER * heads * BLOCK_SIZE * rows_of(groups),
        blocks_of=partial(
            blocks_of, windows=[group.window for group in groups], block_size=BLOCK_SIZE, share_tokens=512
        ),
        context=CONTEXT,
        max_sequences=1,
    )
