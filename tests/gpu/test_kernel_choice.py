"""Every kernel that may be chosen by measurement, against float64, and the choice itself."""

import pytest
import torch

pytest.importorskip("triton")

from penstock.devices.kernel_choice import failure, measure
from penstock.nn.kernels.trials import Heads, attention_operations, page_operations
from penstock.nn.linear.trials import product_operations
from penstock.nn.triton_support import has_triton


def operations(device, is_tiny, *, has_sinks=False):
    """Return all operations, at the sizes of a layer of an 8B Llama.

    Args:
        has_sinks: heads have sinks; then products, which have nothing to do with heads, are left out.
    """
    heads, length = ((4, 2, 16), 128) if is_tiny else ((32, 8, 128), 4096)
    hidden, wide = (64, 128) if is_tiny else (4096, 28672)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    sizes = Heads(
        heads=heads[0], kv_heads=heads[1], head_dim=heads[2], dtype=dtype, device=device, has_sinks=has_sinks
    )
    paged = {"block_size": 16, "sequences": 4, "prompt": length // 2, "context": length // 2}
    products = [
        one
        for bits in (() if has_sinks else ("int8", "int4", "float8"))
        for one in product_operations(bits, outputs=wide, inputs=hidden, dtype=dtype, device=device)
    ]
    of_pages = [
        one
        for pages in ((dtype, torch.int8) if has_triton(device) else ())
        for one in page_operations(sizes, pages=pages, **paged)
    ]
    return {
        one.name + (", 8 bits" if "8 bits" in one.shape else ""): one
        for one in [
            *attention_operations(sizes, rows=2, length=length, windows={None, length // 4}),
            *of_pages,
            *products,
        ]
    }


OF_HEADS = [
    *("attention.rows", "attention.documents", "attention.window"),
    *(f"pages.{what}{bits}" for what in ("decode", "prompts") for bits in ("", ", 8 bits")),
]
NAMES = [
    *OF_HEADS,
    *(f"{bits}.{most}" for bits in ("int8", "int4") for most in (1, 16, 64)),
    "float8",
]


@pytest.mark.parametrize(
    ("name", "has_sinks"),
    [*((name, False) for name in NAMES), *((name, True) for name in OF_HEADS)],
    ids=lambda value: {False: "", True: "sinks"}.get(value, value),
)
def test_every_candidate_is_right_or_is_not_there(name, has_sinks, device, is_tiny):
    """One that raises is out, as it is in use; one that computes is right, and the first computes."""
    operation = operations(device, is_tiny, has_sinks=has_sinks).get(name)
    if operation is None:
        pytest.skip("this device has one kernel of it")
    whys = {kernel: failure(operation, kernel) for kernel in operation.kernels}
    assert whys[operation.first] == ""
    assert not [why for why in whys.values() if why.startswith("wrong")], whys


@pytest.mark.parametrize("name", NAMES)
def test_the_choice_is_one_that_was_timed(name, device, is_tiny):
    operation = operations(device, is_tiny).get(name)
    if operation is None:
        pytest.skip("this device has one kernel of it")
    row = measure(operation, device)
    assert row.kernel in row.us
    assert row.us[row.kernel] <= 1.02 * min(row.us.values())
