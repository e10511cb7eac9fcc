"""What the serving figures of the GPU kit rest on: the bytes a token reads, a prompt's work, busy time."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from gpu_parts.instruments import busy_seconds
from gpu_parts.serving import bytes_per_token, prompt_flops, random_model

from penstock.engine.assemble import engine_of
from penstock.engine.config import EngineConfig
from penstock.models.decoder.config import DecoderConfig

VOCABULARY, HIDDEN, WIDE = 96, 32, 64


def shape(*, tied):
    return DecoderConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip


IN_BLOCK = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * WIDE


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_reads_every_matrix_once_and_one_row_of_the_embedding(tied):
    model = random_model(shape(tied=tied), torch.device("cpu"))
    if tied:
        model.unembed = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        model.unembed.weight = model.embed.weight
    norms = HIDDEN * (2 * 3 + 1)
    assert bytes_per_token(model) == 2 * (3 * IN_BLOCK + HIDDEN * VOCABULARY + norms)


def test_a_token_reads_half_as_much_of_matrices_in_8_bits():
    config = EngineConfig(device="cpu", cache_gib=0.01, weights="int8")
    engine = engine_of(random_model(shape(tied=False), torch.device("cpu")), config)
    numbers = 3 * IN_BLOCK + HIDDEN * VOCABULARY
    assert numbers <= bytes_per_token(engine.runner.model) < 1.5 * numbers
    engine.close()


def test_a_prompts_work_is_that_of_its_tokens_and_the_pairs_that_see_each_other():
    model, length = shape(tied=False), 10
    pairs = sum(range(length)) + length / 2  # a token sees half of itself: n^2 / 2
    by_hand = 2 * length * (3 * IN_BLOCK + HIDDEN * 7) + 3 * 4 * HIDDEN * pairs + 2 * HIDDEN * VOCABULARY
    assert prompt_flops(model, length) == pytest.approx(by_hand, rel=0.005)


def test_a_layer_with_a_window_computes_the_pairs_within_it():
    length, window = 2000, 128
    whole = replace(shape(tied=False), model_type="mistral")
    windows = replace(whole, sliding_window=window)
    mixed = replace(
        windows, model_type="ministral", layer_types=("full_attention", *("sliding_attention",) * 2)
    )
    fewer = sum(max(0, position + 1 - window) for position in range(length))  # pairs of a layer
    for model, narrow in ((mixed, 2), (windows, 3)):
        saved = prompt_flops(whole, length) - prompt_flops(model, length)
        assert saved == pytest.approx(narrow * 4 * HIDDEN * fewer, rel=0.005)


@pytest.mark.parametrize(
    ("spans", "busy"),
    [([], 0), ([(3, 4), (0, 2)], 3), ([(0, 5), (1, 2), (4, 7)], 7), ([(0, 1), (1, 2)], 2)],
)
def test_busy_time_counts_what_overlaps_once(spans, busy):
    assert busy_seconds(spans) == busy
