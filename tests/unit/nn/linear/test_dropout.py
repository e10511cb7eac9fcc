"""Masks of dropout: functions of seed, step, layer, sample and position, wherever they are made."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.decoder.model import Decoder
from penstock.nn.linear.adapter_config import LINEAR_LAYERS, AdapterConfig
from penstock.nn.linear.dropout import Dropout, token_keys, with_token_keys
from penstock.parallel.activation_checkpointing import recompute
from penstock.parallel.adapters import add_adapters
from penstock.parallel.apply import compile_blocks
from penstock.parallel.config import CompileConfig
from tests.examples import examples
from tests.families import ministral3_scaling, small_llama

SAMPLES = torch.tensor([5, 9, 2**40])
KEYS = token_keys(SAMPLES, 12, seed=3, step=7)


@given(
    rate=st.floats(0.0, 0.99),
    first=st.integers(0, 40),
    size=st.integers(1, 40),
    rows=st.permutations(range(3)),
    columns=st.tuples(st.integers(0, 11), st.integers(1, 12)),
)
@examples(50)
def test_a_rank_with_some_rows_tokens_and_inputs_makes_that_part_of_the_mask(
    rate, first, size, rows, columns
):
    whole = Dropout.of(rate, "layers.0.mlp.down").kept(KEYS, first + size)
    keys = token_keys(SAMPLES[list(rows)], 12, seed=3, step=7)[:, slice(*columns)]
    part = Dropout.of(rate, "layers.0.mlp.down", first).kept(keys, size)
    assert torch.equal(part, whole[list(rows)][:, slice(*columns), first:])


def test_the_share_that_is_kept_is_that_of_the_rate_for_every_input_and_mean_values_stay():
    dropout = Dropout.of(0.25, "layers.1.mlp.up")
    keys = token_keys(torch.arange(64), 64, seed=0, step=1)
    kept = dropout.kept(keys, 256).flatten(0, 1).double()
    assert kept.mean().item() == pytest.approx(0.75, abs=4 * (0.1875 / kept.numel()) ** 0.5)
    deviation = (0.1875 / len(kept)) ** 0.5
    assert (kept.mean(0) - 0.75).abs().max() < 5 * deviation
    beside = torch.corrcoef(kept[:, :8].T) - torch.eye(8)
    assert beside.abs().max() < 5 / len(kept) ** 0.5, "inputs of one word are independent"
    assert dropout.scale == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    "other",
    [
        Dropout.of(0.5, "layers.0.mlp.gate").kept(KEYS, 64),
        Dropout.of(0.5, "layers.0.mlp.up").kept(token_keys(SAMPLES, 12, seed=4, step=7), 64),
        Dropout.of(0.5, "layers.0.mlp.up").kept(token_keys(SAMPLES, 12, seed=3, step=8), 64),
        Dropout.of(0.5, "layers.0.mlp.up").kept(token_keys(SAMPLES + 1, 12, seed=3, step=7), 64),
        Dropout.of(0.5, "layers.0.mlp.up").kept(KEYS.roll(1, 1), 64),
    ],
    ids=["layer", "seed", "step", "sample", "position"],
)
def test_masks_of_another_layer_seed_step_sample_or_position_are_unrelated(other):
    equal = (other == Dropout.of(0.5, "layers.0.mlp.up").kept(KEYS, 64)).double().mean().item()
    assert equal == pytest.approx(0.5, abs=5 * 0.5 / other.numel() ** 0.5)


def adapted(method, **changes):
    torch.manual_seed(0)
    model = Decoder(small_llama(num_hidden_layers=1, **changes))
    config = AdapterConfig(method=method, rank=3, alpha=6.0, layers=LINEAR_LAYERS, dropout=0.3)
    add_adapters(model, config, None, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def passes(model, keys):
    """Return the outputs and gradients of two micro-batches; the backward passes follow both forwards."""
    model.zero_grad()
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size
    outputs = [model(ids, token_keys=None if keys is None else keys[rows]) for rows in ([0, 1], [1, 2])]
    torch.stack([each.square().mean() for each in outputs]).sum().backward()
    return [each.detach() for each in outputs], [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("lora", {"model_type": "ministral3", "rope_scaling": ministral3_scaling()}),
        ("dora", {}),
    ],
    ids=["lora, factors on queries", "dora"],
)
def test_recomputed_and_compiled_blocks_drop_what_plain_ones_do(method, changes):
    plain = adapted(method, **changes)
    again, compiled = copy.deepcopy(plain), copy.deepcopy(plain)
    with_token_keys(plain)
    with_token_keys(again)
    recompute(again, ["full"])
    recompute(compiled, ["full"])
    with_token_keys(compiled)
    compile_blocks(compiled, CompileConfig(enabled=True), backend="aot_eager")
    outputs, gradients = passes(plain, KEYS)
    for other, exact in ((again, True), (compiled, False)):
        found, others = passes(other, KEYS)
        for mine, theirs in zip([*found, *others], [*outputs, *gradients], strict=True):
            if exact:
                assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    undropped = passes(plain, None)[0]
    assert not torch.allclose(undropped[0], outputs[0], atol=1e-3)
