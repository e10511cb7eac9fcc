"""The steps that are tried on a GPU can be computed, whatever the sizes; what they take is not measured."""

import pytest
import torch

from penstock.engine.model_runner.lora import Adapters
from penstock.engine.workers.model_shard import ModelShard
from penstock.engine.workers.warmup import try_step
from penstock.models.llama.model import Llama
from tests.families import small_llama

CONFIG = small_llama(max_position_embeddings=64)


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
