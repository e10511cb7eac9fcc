"""Whether a device runs the Triton kernels, asked in a compiled block."""

import torch

from penstock.nn import triton_support


def test_a_compiled_block_may_ask(monkeypatch):
    asked = []
    monkeypatch.setattr(triton_support, "_is_made_for", lambda index: not asked.append(index))

    def step(x):
        return x + 1 if triton_support.has_triton(torch.device("cuda", 3)) else x

    assert torch.compile(step, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2
    assert asked == [3]
