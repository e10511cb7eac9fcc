"""What test_pages_on_gpus.py runs in processes of their own: on import Triton decides if it interprets."""

import sys

import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.nn.test_paged import a_layer, a_step, written_out
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.nn.kernels import paged_triton

SINGLES = st.lists(st.integers(1, 100).map(lambda length: (1, length)), max_size=3)
LONGER = st.lists(
    st.tuples(st.integers(2, 70), st.integers(0, 40)).map(lambda s: (s[0], s[0] + s[1])), max_size=2
)


@given(
    shares=st.tuples(SINGLES, LONGER).map(lambda both: both[0] + both[1]).filter(bool),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (20, 1)]),
    block_size=st.sampled_from([1, 16]),
    head_dim=st.sampled_from([16, 40]),
    window=st.sampled_from([None, 1, 5, 30]),
)
@settings(max_examples=25, deadline=None)
def any_layout_is_attended_as_written_out(shares, heads, block_size, head_dim, window):
    check(shares, heads=heads, block_size=block_size, head_dim=head_dim, window=window)


def check(shares, *, heads, block_size, head_dim, window=None, dtype=torch.float32, tolerance=1e-5):
    step, num_blocks = a_step(shares, block_size=block_size)
    sizes = {"heads": heads[0], "kv_heads": heads[1], "block_size": block_size, "head_dim": head_dim}
    pages, q, k, v = a_layer(step, num_blocks, **sizes, dtype=dtype)
    keys, values = pages.append(k, v)
    q_thd = q[0].transpose(0, 1).contiguous()
    out = paged_triton.paged_attention(q_thd, keys, values, step, window=window, scale=0.3)
    expected = written_out(q, pages, shares, scale=0.3, window=window)[0].transpose(0, 1)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def interpret():
    paged_triton.SPLIT = 32
    any_layout_is_attended_as_written_out()
    # half a unit in the last place is 2^-12, of weights and of results up to about 2; of bfloat16 the
    # interpreter multiplies bits
    shape = {"heads": (4, 2), "block_size": 16, "head_dim": 32}
    check([(1, 90), (20, 50)], **shape, dtype=torch.float16, tolerance=2**-10)


def compile_for_gpus():
    """Print the bytes of shared memory of each program, for the sizes of an 8B model."""
    keys = torch.empty(1, 8, 16, 128, dtype=torch.bfloat16)
    sizes = paged_triton._sizes(keys, group=4, window=None)
    sums = {"WINDOW": 0, "D": 128, "D_PADDED": 128, "SPLIT": 256}
    for capability in (80, 90):
        for kernel, constants, kind in (
            (paged_triton._attend, sizes | {"SPLIT": 256, "TOKENS": 1, "ROWS": 16}, "fp32"),
            (paged_triton._attend, sizes | {"SPLIT": 0, "TOKENS": 16, "ROWS": 64}, "bf16"),
            (paged_triton._add_up, sums, "fp32"),
        ):
            print(shared_bytes(capability, kernel, constants, {"sums": kind, "weights": kind}))


def shared_bytes(capability, kernel, constants, results):
    types = dict.fromkeys(("q", "keys", "values", "out"), "*bf16")
    types |= dict.fromkeys(("starts", "lengths", "tables"), "*i32")
    types |= {"num_shares": "i32", "table_stride": "i32", "scale": "fp32", "num_parts": "i32"}
    types |= {name: f"*{kind}" for name, kind in results.items()}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [(i,) for i, name in enumerate(names) if name in ("q", "keys", "values")]
    attributes = {at: [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
    return made.metadata.shared


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_gpus}[sys.argv[1]]()
