"""The C++ operators on several threads, in a process of their own: that of the tests has one."""

import os
import subprocess
import sys

import pytest

from penstock.nn import native

RUN = """
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from penstock.models.decoder.model import Decoder
from penstock.nn import native
from penstock.nn.kernels.paged import Paged
from penstock.nn.linear.packed import PackedLinear, can_multiply
from tests.loras import save_lora
from tests.unit.engine.model_runner.test_whole_steps import CONFIGS, STEPS, a_batch, a_runner
from tests.paged_cases import a_layer, a_step
from tests.unit.nn.test_paged import LONG

assert native.is_available()
step, num_blocks = a_step(LONG * 3, block_size=16)
ops = torch.ops.penstock

@torch.no_grad()
def computed(dtype):
    pages, q, k, v = a_layer(
        step, num_blocks, heads=4, kv_heads=2, block_size=16, head_dim=64, dtype=dtype
    )
    t = q.shape[2]
    qkv = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (q, k, v)], dim=1)
    angles = torch.linspace(0, 1, t * 64).view(t, 64).to(dtype)
    rotated = ops.rotate_and_store(
        qkv, angles, angles, step.slots, pages.keys, pages.values, None, None, 0.0
    )
    attended = Paged(step).attend(rotated, pages.keys, pages.values, scale=0.125)
    rows = attended.flatten(1)
    normed = ops.add_rms_norm(rows.clone(), rows, 0.5, torch.ones_like(rows[0]), 1e-5)
    made = [pages.keys, pages.values, attended, normed, ops.activate(normed, 0, True)]
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 200).to(dtype)
    if can_multiply(layer.weight):
        made.append(PackedLinear(layer)(normed))
        for weights in ("stored", "int8", "int4"):
            runner = a_runner("qwen2", dtype=dtype, weights=weights)
            for spans in STEPS:
                made.append(runner.run(a_batch(spans, asked=[0, 2])).logits)
            made.append(runner.cache.pages)
        with TemporaryDirectory() as folder:
            runner.add_adapter("a", save_lora(Path(folder, "a"), Decoder(CONFIGS["qwen2"]), rank=20))
        made.append(runner.run(replace(a_batch(STEPS[0]), adapters=np.array([0, -1, 0], np.int32))).logits)
        made += many_tokens(dtype)
    return made

# More tokens than a chunk has: prompts that are cut, one that goes on, many single tokens.
MANY = [
    [(0, 100), (0, 37), (0, 1), (0, 128)] + [(0, 3)] * 8,
    [(100, 101), (37, 139), (1, 2), (128, 160)] + [(3, 4)] * 8,
    [(101, 150), (139, 140), (2, 99), (160, 161)] + [(4, 5)] * 8,
]

def many_tokens(dtype):
    blocks = np.random.default_rng(0).permutation(12 * 41).reshape(12, 41).astype(np.int32)
    made = []
    for name in ("llama", "mistral", "qwen2"):
        for weights, pages in (("stored", None), ("int8", torch.int8)):
            runner = a_runner(name, dtype=dtype, weights=weights, pages=pages, num_blocks=blocks.size)
            with TemporaryDirectory() as folder:
                runner.add_adapter("a", save_lora(Path(folder, "a"), Decoder(CONFIGS[name]), rank=20))
            for spans in MANY:
                lasts = np.cumsum([past - first for first, past in spans]) - 1
                batch = a_batch(spans, asked=sorted({5, *lasts}), vectors=[lasts[1] - 1], blocks=blocks)
                done = runner.run(batch)
                made += [done.logits, done.hidden[[5, *lasts, lasts[1] - 1]]]
            made.append(runner.cache.pages)
            adapted = replace(batch, adapters=np.array([0, -1, -1, 0] + [0] * 8, np.int32))
            made.append(runner.run(adapted).logits)
    return made

for dtype in (torch.float32, torch.bfloat16):
    torch.set_num_threads(1)
    alone = computed(dtype)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, alone, computed(dtype))), (dtype, threads)
print("equal")
"""


@pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")
def test_the_number_of_threads_changes_no_bit():
    variables = os.environ | {"OMP_NUM_THREADS": "5"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=variables, capture_output=True, text=True, check=False
    )
    assert done.stdout == "equal\n", done.stdout + done.stderr
