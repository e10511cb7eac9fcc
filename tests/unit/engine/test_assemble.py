"""An engine of a model in memory answers as that of its folder does."""

from copy import deepcopy

import pytest
import torch

from penstock.checkpoint.hf import save_pretrained
from penstock.core.errors import ConfigError
from penstock.engine.assemble import build_engine, engine_of
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights

CONFIG = EngineConfig(device="cpu", cache_gib=0.01, compile="off")


@pytest.fixture
def model():
    made = Decoder(
        DecoderConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=48,
        )
    )
    init_weights(made, seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)  # so that tokens are no near ties
    return made.eval()


def answers(engine):
    ids = [engine.add(Request(prompt=prompt, max_tokens=9)) for prompt in ((5, 9, 2), (7,), (1, 60) * 8)]
    found = {request_id: [] for request_id in ids}
    while engine.has_work:
        for piece in engine.step():
            found[piece.request_id] += piece.token_ids
    engine.close()
    return list(found.values())


def test_a_model_in_memory_answers_as_its_folder_does(model, tmp_path):
    save_pretrained(model.state_dict(), model.config, tmp_path / "model")
    expected = answers(build_engine(tmp_path / "model", CONFIG))
    assert [len(tokens) for tokens in expected] == [9, 9, 9]
    assert answers(engine_of(deepcopy(model), CONFIG)) == expected


def test_a_model_in_memory_is_not_shared_by_processes(model):
    with pytest.raises(ConfigError, match=r"one process only \(got 'tensor_parallel=2'\)\. .*build_engine"):
        engine_of(model, EngineConfig(tensor_parallel=2))
