"""The bytes that blocks keep, as planned, against the tensors that are alive after a forward pass."""

import pytest
import torch
from tests.families import mixed

from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.nn.kernels.choose import masked
from penstock.parallel.activation_checkpointing import recompute
from penstock.plan.activations import block_bytes
from penstock.testing.step_memory import LiveBytes

ROWS, LENGTH = 2, 64
ENDS = torch.tensor([0, 20, 64, 128], dtype=torch.int32)
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def alive_after_forward(shape, mode, dtype, *, by_formula=False):
    model = Decoder(shape).to(dtype)
    if by_formula:
        model.choose = lambda layout, *, dtype, head_dim, **_: masked(
            layout, torch.empty(0, head_dim, dtype=dtype)
        )
    init_weights(model, seed=0)
    recompute(model, [mode] * len(model.layers))
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with LiveBytes() as seen:
        hidden = model.hidden(ids, cu_seqlens=ENDS)
        kept = seen.now
    del hidden
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["keep", "operators", "full"])
@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("llama", "both"),
        ("qwen3", "both"),
        ("hunyuan_v1_dense", "both"),
        ("granite_swa", "both"),
        ("gemma2", "both"),
        ("qwen3", "attention"),
        ("llama", "mlp"),
    ],
)
def test_a_block_keeps_what_the_plan_says(model_type, parts, mode, dtype):
    """Within 1%: what two blocks keep after another, so that what a model keeps once is not in it."""
    cap = {"attn_logit_softcapping": 50.0} if model_type == "gemma2" else {}
    sizes = {**SIZES, **cap, "model_type": model_type}
    one, shape = (
        mixed(DecoderConfig(**sizes, num_hidden_layers=blocks), "both", parts, parts) for blocks in (1, 3)
    )
    found = [alive_after_forward(config, mode, dtype) for config in (one, shape)]
    planned = block_bytes(shape, shape.layers[1], tokens=ROWS * LENGTH, compute_bytes=dtype.itemsize)[mode]
    assert (found[1] - found[0]) / 2 == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["keep", "operators", "full"])
def test_sinks_without_a_kernel_that_returns_log_sums_keep_what_the_plan_says(mode, dtype):
    """Within 1%, as above."""
    one, shape = (
        DecoderConfig(**SIZES, model_type="granite_swa", num_hidden_layers=blocks) for blocks in (1, 3)
    )
    found = [alive_after_forward(config, mode, dtype, by_formula=True) for config in (one, shape)]
    planned = block_bytes(
        shape,
        shape.layers[1],
        tokens=ROWS * LENGTH,
        compute_bytes=dtype.itemsize,
        row=LENGTH,
        lacks_log_sums=True,
    )
    assert (found[1] - found[0]) / 2 == pytest.approx(planned[mode], rel=0.01)


def test_norms_of_each_head_are_counted_alike_before_and_after_rotation():
    before, after = (
        DecoderConfig(**SIZES, num_hidden_layers=1, model_type=name) for name in ("qwen3", "hunyuan_v1_dense")
    )
    assert (
        len({str(block_bytes(one, one.layers[0], tokens=8, compute_bytes=4)) for one in (before, after)}) == 1
    )
