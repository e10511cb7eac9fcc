"""The steps that are tried on a GPU can be computed, whatever the sizes; what they take is not measured."""

import pytest
import torch

from penstock.engine.model_runner.lora import Adapters
from penstock.engine.workers import warmup
from penstock.engine.workers.model_shard import ModelShard
from penstock.engine.workers.warmup import compile_draws, try_step
from penstock.models.llama.model import Llama
from tests.families import small_llama

CONFIG = small_llama(max_position_embeddings=64)


def a_part():
    model = Llama(CONFIG).to(torch.bfloat16).eval()
    return ModelShard(
        model=model,
        adapters=Adapters(model, CONFIG),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        pages_dtype=torch.bfloat16,
        group=None,
    )


@pytest.mark.parametrize(("tokens", "sequences"), [(7, 3), (16, 16), (1000, 256)])
def test_steps_of_answers_and_one_as_large_as_steps_may_be_are_computed(tokens, sequences):
    model = Llama(CONFIG).eval()
    part = ModelShard(
        model=model,
        adapters=Adapters(model, CONFIG),
        device=torch.device("cpu"),
        dtype=torch.float32,
        pages_dtype=torch.float32,
        group=None,
    )
    seen = []
    model.norm.register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape)))
    try_step(part, tokens_per_step=tokens, max_sequences=sequences, block_size=4)
    answers = [count for count in (1, 32, 64) if count <= min(tokens, sequences)]
    assert seen == [(1, count, CONFIG.hidden_size) for count in [*answers, min(tokens, 64)]]


def test_draws_are_compiled_for_the_logits_of_steps_and_for_changed_ones(monkeypatch):
    """On the null GPU `make null-gpu` counts what a first request with a penalty compiles: nothing."""
    seen = set()
    monkeypatch.setattr(warmup, "has_triton", lambda _: True)
    monkeypatch.setattr(
        warmup,
        "choose",
        lambda logits, settings, _numbers=(): seen.add((logits.dtype, logits.shape[1], settings is None)),
    )
    part = a_part()
    part.adapters.num_new_tokens["a"] = 3
    compile_draws(part)
    vocab = CONFIG.vocab_size
    assert seen == {
        (dtype, width, greedy)
        for dtype in (torch.bfloat16, torch.float32)
        for width in (vocab, vocab + 3)
        for greedy in (True, False)
    }
