"""What tests of the C++ operators share."""

import pytest
import torch

from penstock.nn import native


@pytest.fixture(params=["pairs", "float32"])
def cells(request):
    """Multiply bfloat16 as CPUs do that multiply pairs faster, or as the others do."""
    if not native.is_available():
        pytest.skip("this machine has no such operators")
    use = torch.ops.penstock.use_pairs
    was = use(request.param == "pairs")
    try:
        if use(request.param == "pairs") != (request.param == "pairs"):
            pytest.skip("this CPU does not multiply pairs")
        yield request.param
    finally:
        use(was)
