"""For the tests of the GPU kit: on which device, and in which sizes.

    pytest -c tests/gpu/pytest.ini tests/gpu --device cuda
    TRITON_INTERPRET=1 pytest -c tests/gpu/pytest.ini tests/gpu/test_paged.py --device cpu --size tiny

`benchmarks/gpu.py` runs them, CI too; the ordinary suite passes over them (pyproject.toml).
"""

import ctypes

import pytest
import torch

from penstock.devices import kernel_choice


def pytest_addoption(parser):
    parser.addoption("--device", default="cuda", help="what is tested")
    parser.addoption(
        "--size", choices=["full", "tiny"], default="full", help="tiny: shapes that take seconds"
    )


@pytest.fixture(scope="session")
def device(request):
    return torch.device(request.config.getoption("--device"))


def pytest_configure(config):
    config.addinivalue_line("markers", "computes(why): what cannot run on the null GPU, and why")


@pytest.fixture(autouse=True)
def not_on_the_null_gpu(request):
    mark = request.node.get_closest_marker("computes")
    if mark is not None and hasattr(ctypes.CDLL(None), "null_gpu_totals"):
        pytest.skip(f"not on the null GPU: {mark.args[0]}")


@pytest.fixture(autouse=True)
def first_kernels_on_the_null_gpu(monkeypatch):
    """What computes nothing fails the test of every kernel."""
    if hasattr(ctypes.CDLL(None), "null_gpu_totals"):
        monkeypatch.setattr(kernel_choice, "FIRST_START_S", 0.0)


@pytest.fixture(scope="session")
def is_tiny(request):
    return request.config.getoption("--size") == "tiny"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
