"""What the kernels' rooflines of the GPU kit count: pairs of tokens, and bytes of matrices and pages."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from gpu_parts.kernels import Kernels, causal_pairs, stored_bytes
from gpu_parts.part import Part

from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from penstock.nn.linear.quantized import Int4Linear, Int8Linear


def test_pairs_are_those_of_the_mask_but_for_half_a_token_each():
    ends = [0, 5, 12, 24, 27, 48]
    layout = AttentionLayout(batch=2, seq_len=24, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    seen = visibility_mask(layout, device=torch.device("cpu")).sum().item()
    assert causal_pairs(ends) == seen - 48 / 2


@pytest.mark.parametrize(("bits", "layer"), [("int8", Int8Linear), ("int4", Int4Linear)])
def test_a_matrix_is_read_with_its_scales(bits, layer):
    made = layer(torch.nn.Linear(96, 64, bias=False))
    assert 64 * stored_bytes(bits, 96) == made.codes.nbytes + made.scales.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_step_over_pages_attends_to_what_was_written(dtype, tmp_path):
    part = Part("kernels", torch.device("cpu"), True, 10.0, tmp_path / "kernels.json")
    rows = Kernels(part)
    q, keys, values, step = rows._pages(3, 40, dtype=dtype)
    width = {torch.bfloat16: 2 * rows.dim, torch.int8: rows.dim + 4}[dtype]
    assert keys.nbytes == values.nbytes == 3 * 48 * rows.kv_heads * width  # 3 blocks of 16 for 40
    assert q.shape == (3, rows.heads, rows.dim)
    assert step.lengths.tolist() == [40] * 3
    assert step.num_singles == 3
    assert sorted(step.block_tables.flatten().tolist()) == list(range(9))
