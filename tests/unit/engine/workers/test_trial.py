"""The steps that are tried on a GPU can be computed, whatever the sizes; what they take is not measured."""

from dataclasses import replace

import pytest
import torch

from penstock.engine.model_runner.lora import Adapters
from penstock.engine.scheduling.groups import cache_groups
from penstock.engine.workers import warmup
from penstock.engine.workers.model_shard import ModelShard
from penstock.engine.workers.warmup import activation_bytes, compile_draws, try_step
from penstock.models.decoder.model import Decoder
from penstock.nn.kernels import paged
from tests.families import small_llama

CONFIG = small_llama(max_position_embeddings=64)


def a_part():
    model = Decoder(CONFIG).to(torch.bfloat16).eval()
    return ModelShard(
        model=model,
        adapters=Adapters(model, CONFIG),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        pages_dtype=torch.bfloat16,
        group=None,
        groups=cache_groups(CONFIG.windows, context=CONFIG.context),
    )


@pytest.mark.parametrize(("tokens", "sequences"), [(7, 3), (16, 16), (1000, 256)])
def test_steps_of_answers_and_one_as_large_as_steps_may_be_are_computed(tokens, sequences):
    model = Decoder(CONFIG).eval()
    part = ModelShard(
        model=model,
        adapters=Adapters(model, CONFIG),
        device=torch.device("cpu"),
        dtype=torch.float32,
        pages_dtype=torch.float32,
        group=None,
        groups=cache_groups(CONFIG.windows, context=CONFIG.context),
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


@pytest.mark.parametrize("pages", [torch.bfloat16, torch.int8], ids=["16 bits", "8 bits"])
def test_what_prompts_gather_beyond_the_trial_is_counted(pages, monkeypatch):
    monkeypatch.setattr(warmup.accelerator, "forget_peak", lambda _: 0)
    monkeypatch.setattr(warmup.accelerator, "peak_bytes", lambda _: 1000)
    monkeypatch.setattr(warmup.accelerator, "free_cache", lambda: None)
    monkeypatch.setattr(paged, "_MAX_GATHERED", 100)

    def taken(kernel, sequences):
        part = replace(a_part(), pages_dtype=pages, kernels={paged.PROMPTS: kernel})
        return activation_bytes(part, tokens_per_step=16, max_sequences=sequences, block_size=4, context=32)

    numbers = CONFIG.key_value_heads * CONFIG.size_of_head
    per_key = numbers * (2 * 2 + (pages == torch.int8))
    assert taken(paged.TRITON, 5) == 1000
    assert taken("varlen, gathered", 2) == 1000 + per_key * (64 - 16)
    assert taken("SDPA and varlen, gathered", 5) == 1000 + per_key * (100 - 16)
