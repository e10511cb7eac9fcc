"""For the tests of the GPU kit: on which device, and in which sizes.

    pytest -c tests/gpu/pytest.ini tests/gpu --device cuda
    TRITON_INTERPRET=1 pytest -c tests/gpu/pytest.ini tests/gpu/test_paged.py --device cpu --size tiny

`benchmarks/gpu.py` runs them, CI too; the ordinary suite passes over them (pyproject.toml).
"""

import ctypes

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cuda", help="what is tested")
    parser.addoption(
        "--size", choices=["full", "tiny"], default="full", help="tiny: shapes that take seconds"
    )


@pytest.fixture(scope="session")
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def nvrtc():
    """Skip on the null GPU what torch compiles by NVRTC, which cannot run there."""
    if hasattr(ctypes.CDLL(None), "null_gpu_totals"):
        pytest.skip("torch compiles a kernel for it by NVRTC, which the null GPU lacks")


@pytest.fixture(scope="session")
def is_tiny(request):
    return request.config.getoption("--size") == "tiny"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
