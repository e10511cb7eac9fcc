"""Whether a device runs the Triton kernels, asked in a compiled block."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from penstock.nn import triton_support


def test_a_compiled_block_may_ask(monkeypatch):
    asked = []
    monkeypatch.setattr(triton_support, "_is_made_for", lambda index: not asked.append(index))

    def step(x):
        return x + 1 if triton_support.has_triton(torch.device("cuda", 3)) else x

    assert torch.compile(step, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2
    assert asked == [3]


@pytest.fixture
def a_gpu(monkeypatch):
    """Have a GPU that is new enough, on which the probe does what a test says."""
    monkeypatch.setattr(triton_support, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_support.torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(triton_support, "on_device_of", lambda _: nullcontext())
    probe = SimpleNamespace(launch=lambda _: None)
    monkeypatch.setitem(sys.modules, "penstock.nn.probe_triton", probe)
    for cached in (triton_support._compiles, triton_support._is_made_for):
        cached.cache_clear()
    yield probe
    for cached in (triton_support._compiles, triton_support._is_made_for):
        cached.cache_clear()


def test_a_triton_that_compiles_is_used(a_gpu, caplog):
    assert a_gpu
    assert triton_support.has_triton(torch.device("cuda", 0))
    assert not caplog.text


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Failed to find C compiler.\nSet CC"), FileNotFoundError("ptxas"), ImportError("no")],
)
def test_a_triton_that_does_not_compile_leaves_the_kernels_of_torch_and_says_so_once(a_gpu, caplog, error):
    def launch(_):
        raise error

    a_gpu.launch = launch
    device = torch.device("cuda", 0)
    assert [triton_support.has_triton(device) for _ in range(3)] == [False] * 3
    assert caplog.text.count("Triton compiles no kernel for this GPU") == 1
    assert type(error).__name__ in caplog.text
