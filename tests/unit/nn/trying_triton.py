"""What test_triton_kernels.py runs in processes of their own: on import Triton decides if it interprets."""

import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.engine.sampling import draw_triton
from penstock.engine.sampling.filters import choose_plain, settings_tensor
from penstock.engine.sampling_params import Sampling
from penstock.nn.kernels import paged_triton
from penstock.nn.kernels.pages import page_width
from penstock.nn.linear import float8_triton, quantized_triton
from penstock.nn.linear.float8 import LARGEST_EXPONENT, MANTISSA_OF_LARGEST, ROW, power_of_two, scaled
from penstock.nn.linear.rounding import GROUP, to_halves, to_int4, to_int8
from tests.examples import examples
from tests.paged_cases import a_few_sinks, a_layer, a_step, written_out
from tests.sampling_cases import numbers, rows, samplings

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
    pages=st.sampled_from([None, torch.int8]),
    has_sinks=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 50.0]),
)
@examples(40)
def any_layout_is_attended_as_written_out(
    shares, heads, block_size, head_dim, window, pages, has_sinks, softcap
):
    sizes = {"heads": heads, "block_size": block_size, "head_dim": head_dim}
    # 1 - 2 / (e^2x + 1) of a small x has the absolute error of 1
    sizes["tolerance"] = 1e-5 if softcap is None else 2e-5
    check(shares, **sizes, window=window, kept=pages, has_sinks=has_sinks, softcap=softcap)


def check(
    shares,
    *,
    heads,
    block_size,
    head_dim,
    window=None,
    dtype=torch.float32,
    kept=None,
    tolerance=1e-5,
    has_sinks=False,
    softcap=None,
):
    step, num_blocks = a_step(shares, block_size=block_size)
    sizes = {"heads": heads[0], "kv_heads": heads[1], "block_size": block_size, "head_dim": head_dim}
    pages, q, k, v = a_layer(step, num_blocks, **sizes, dtype=dtype, pages=kept)
    keys, values = pages.append(k, v)
    if kept is None:  # the kernel writes what plain torch does
        written = torch.zeros_like(keys), torch.zeros_like(values)
        paged_triton.store(k, v, *written, step.slots)
        at = step.slots // block_size, slice(None), step.slots % block_size
        assert torch.equal(written[0][at], keys[at])
        assert torch.equal(written[1][at], values[at])
        assert written[0].count_nonzero() == k.count_nonzero()  # and nothing else
    q_thd = q[0].transpose(0, 1).contiguous()
    of = {"scale": 0.3, "window": window, "softcap": softcap}
    of["sinks"] = a_few_sinks(heads[0]) if has_sinks else None
    out = paged_triton.paged_attention(q_thd, keys, values, step, **of)
    expected = written_out(q, pages, shares, **of)[0].transpose(0, 1)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@given(
    num_tokens=st.sampled_from([1, 5, 16, 33, 64]),
    outputs=st.sampled_from([1, 40, 64]),
    groups=st.sampled_from([1, 4, 8, 10]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
@examples(15)
def products_are_those_of_the_numbers_that_codes_stand_for(num_tokens, outputs, groups, dtype):
    torch.manual_seed(num_tokens)
    weight, x = torch.randn(outputs, groups * GROUP) / 10, torch.randn(num_tokens, groups * GROUP).to(dtype)
    # float32: sums of 320 products about 0.1; float16: those of the tokens, rounded at the end
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-10, "atol": 2**-10}

    codes, scales = to_int8(weight)
    expected = x.double() @ (codes.double() * scales.double()[:, None]).T
    torch.testing.assert_close(quantized_triton.linear_int8(x, codes, scales).double(), expected, **near)

    codes, scales = to_int4(weight)
    numbers = ((codes.float() - 8) * scales.float().repeat_interleave(GROUP, 1)).to(dtype)
    out = quantized_triton.linear_int4(x, to_halves(codes), scales)
    torch.testing.assert_close(out.double(), x.double() @ numbers.double().T, **near)
    for inputs in (groups * GROUP, groups * GROUP - 5):
        out = quantized_triton.written_out_int4(to_halves(codes), scales, inputs=inputs, dtype=dtype)
        assert torch.equal(out, numbers[:, :inputs])


def computed(ptx, *inputs):
    """Return what lines of PTX leave in their outputs: of 32 bits, and bfloat16 by twos.

    Args:
        inputs: of `$n` and the registers after it, where the n registers before are outputs.
    """
    lines = [line for line in ptx.splitlines() if line.endswith(";") and not line.startswith(".")]
    num_outputs = len({word for line in lines for word in re.findall(r"\$\d+", line)}) - len(inputs)
    registers = {f"${num_outputs + i}": value for i, value in enumerate(inputs)}

    def of(word):
        return registers[word] if word in registers else int(word, 0)

    def pair(value):
        return torch.tensor([value & 0xFFFF, value >> 16], dtype=torch.int32).short().view(torch.bfloat16)

    for line in lines:
        name, *words = re.findall(r"[\w.$]+", line)
        given = [of(word) for word in words[1:]]
        if name == "mov.b32":
            result = given[0]
        elif name == "and.b32":
            result = given[0] & given[1]
        elif name == "shr.u32":
            result = given[0] >> given[1]
        elif name == "prmt.b32":
            pool = (given[0] | given[1] << 32).to_bytes(8, "little")
            result = int.from_bytes([pool[given[2] >> 4 * i & 7] for i in range(4)], "little")
        elif name == "fma.rn.bf16x2":
            a, b, c = (pair(value).double() for value in given)
            low, high = ((a * b + c).bfloat16().view(torch.int16).int() & 0xFFFF).tolist()
            result = low | high << 16
        else:
            raise NotImplementedError(line)
        registers[words[0]] = result
    return torch.cat([pair(registers[f"${i}"]) for i in range(num_outputs)])


def ptx_widens_every_byte_exactly():
    for first in range(0, 256, 4):
        four = bytes(range(first, first + 4))
        word, codes = int.from_bytes(four, "little"), torch.tensor(list(four))
        expected = codes.to(torch.int8).bfloat16()
        assert computed(quantized_triton._WIDEN_INT8.value, word).equal(expected)
        scales = torch.tensor([0.0123, -3.4e-5, 1.0, 2.0**-120]).bfloat16()
        both = [int(n) & 0xFFFF for n in scales.view(torch.int16)]
        pairs = both[0] | both[1] << 16, both[2] | both[3] << 16
        expected = torch.cat([(codes & 15) - 8, (codes >> 4) - 8]).bfloat16() * scales.repeat(2)
        assert computed(quantized_triton._WIDEN_INT4.value, word, *pairs).equal(expected)


@given(rows(), st.lists(samplings, min_size=5, max_size=5), st.lists(numbers, min_size=5, max_size=5))
@examples(60)
def the_same_tokens_are_drawn_as_by_plain_torch(logits, chosen, drawn):
    wanted = settings_tensor(chosen[: len(logits)], drawn[: len(logits)], vocab=logits.shape[1])
    assert draw_triton.draw(logits, wanted).tolist() == choose_plain(logits, wanted).tolist()
    assert draw_triton.draw(logits, None).tolist() == choose_plain(logits, None).tolist()


def the_first_of_the_largest_is_drawn_from_any_part_of_a_row():
    for shape in ((1, 3 * draw_triton.BLOCK + 5), (2, 4 * draw_triton.BLOCK + 1), (3, 40)):
        logits = torch.randint(-3, 4, shape).float()  # equals in every part
        logits[0, : draw_triton.BLOCK] = -torch.inf  # nothing in the first part
        assert draw_triton.draw(logits, None).tolist() == choose_plain(logits, None).tolist()
        logits[0, -1], logits[-1, 0] = torch.nan, torch.nan
        assert draw_triton.draw(logits, None).tolist() == choose_plain(logits, None).tolist()


def rows_are_drawn_however_they_lie_in_memory():
    logits = torch.randn(3, 500)
    wanted = settings_tensor([Sampling(top_p=0.9)] * 3, [0.1, 0.5, 0.9], vocab=500)
    expected = choose_plain(logits, wanted).tolist()
    assert draw_triton.draw(logits.T.contiguous().T, wanted).tolist() == expected
    assert draw_triton.draw(torch.cat([logits, logits], 1)[:, :500], wanted).tolist() == expected
    logits[0, 7], logits[1], logits[2, 499] = torch.nan, -torch.inf, torch.inf
    assert draw_triton.draw(logits, wanted).tolist() == [-1] * 3
    assert draw_triton.draw(logits, None).tolist() == [-1] * 3


@given(
    rows=st.integers(1, 4),
    multiple=st.sampled_from([1, 3, 16]),
    columns=st.sampled_from([16, 48, 2000]),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 448.0, 3e38]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
@examples(30)
def rows_are_rounded_to_float8_as_by_plain_torch(rows, multiple, columns, scale, dtype):
    x = (torch.randn(rows, columns).clamp(-1, 1) * scale).to(dtype)
    x[0, :2] *= torch.tensor([2.0**-12, 2.0**-14])  # codes below 2 ** -6
    codes, scales = float8_triton.rounded_rows(
        x, multiple, largest_exponent=LARGEST_EXPONENT[torch.float8_e4m3fn], mantissa=MANTISSA_OF_LARGEST
    )
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % multiple))
    expected = scaled(padded, ROW, torch.float8_e4m3fn)
    assert scales.equal(power_of_two(expected.exponents))
    assert codes.view(torch.uint8).equal(expected.codes.view(torch.uint8))


def interpret():
    rows_are_rounded_to_float8_as_by_plain_torch()
    draw_triton.BLOCK = 512  # so that rows have several blocks, and the last of some has one token
    the_same_tokens_are_drawn_as_by_plain_torch()
    draw_triton._PROGRAMS = 4  # of 2 rows each part has more than a block
    the_first_of_the_largest_is_drawn_from_any_part_of_a_row()
    rows_are_drawn_however_they_lie_in_memory()
    paged_triton.SPLIT, paged_triton._MAX_PARTS = 32, 2
    any_layout_is_attended_as_written_out()
    products_are_those_of_the_numbers_that_codes_stand_for()
    ptx_widens_every_byte_exactly()
    # half a unit in the last place is 2^-12, of weights and of results up to about 2; of bfloat16 the
    # interpreter multiplies bits
    shape = {"heads": (4, 2), "block_size": 16, "head_dim": 32}
    for kept in (None, torch.int8):
        check([(1, 90), (20, 50)], **shape, dtype=torch.float16, kept=kept, tolerance=2**-10)


TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int64: "i64",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
}


class Compiler:
    """Stands for a kernel: what is launched is compiled for GPUs; prints what shared memory it takes.

    Args:
        whole: each launch is compiled for both generations; else the first of a kernel is, of attention the
            first to decode and the first to prefill, and others for the newer alone.
    """

    def __init__(self, kernel, whole):
        self.kernel, self.whole, self.begun = kernel, whole, set()

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, **constants):
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
        given = dict(zip(self.kernel.arg_names, arguments, strict=False))
        signature = {name: kind_of(value) for name, value in given.items()} | dict.fromkeys(
            constants, "constexpr"
        )
        aligned = {
            (parameter.num,): [["tt.divisibility", 16]]
            for parameter in self.kernel.params
            if is_aligned(parameter, given.get(parameter.name))
        }
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=aligned)
        older = 89 if self.kernel is float8_triton._round.kernel else 80
        is_other = self.whole or constants.get("KEYS") not in self.begun
        self.begun.add(constants.get("KEYS"))
        for capability in (older, 90) if is_other else (90,):
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            if capability == 90:  # on an A100 attention spills a few
                assert stack_bytes(made.asm["cubin"]) == 0, f"{self.kernel.__name__} spills registers"
            if constants.get("KEYS"):  # numbers or codes of keys and values are read 16 bytes at a time
                assert "cp.async.cg.shared.global" in made.asm["ptx"]
                narrow = re.findall(r"cvt\.rn\.\S+\.s(?:8|16)|ld\.shared\.b8", made.asm["ptx"])
                assert not narrow, f"codes are widened one by one: {narrow[:3]}"
            print(made.metadata.shared)


def stack_bytes(cubin):
    """Return the bytes of a thread's stack, which holds registers that were spilled."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [tools / "cuobjdump", "--dump-resource-usage", file.name]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", found)[1])


def is_aligned(parameter, value):
    if isinstance(value, torch.Tensor):
        return not parameter.do_not_specialize_on_alignment
    return isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize


def kind_of(value):
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def compile_for_gpus(*, whole=False):
    """Launch what an 8B model does."""
    for module, names in (
        (paged_triton, ("_attend", "_add_up", "_store")),
        (quantized_triton, ("_few_int8", "_many_int8", "_few_int4", "_many_int4", "_write_out_int4")),
        (float8_triton, ("_round",)),
        (draw_triton, ("_draw", "_largest_of_parts", "_largest")),
    ):
        for name in names:
            setattr(module, name, Compiler(getattr(module, name), whole))
    step, num_blocks = a_step([(1, 700), (20, 30)], block_size=16)
    queries = torch.empty(21, 32, 128, dtype=torch.bfloat16)
    for dtype, softcap in ((torch.bfloat16, None), (torch.int8, None), (torch.bfloat16, 50.0)):
        keys = torch.zeros(num_blocks, 8, 16, page_width(128, dtype), dtype=dtype)
        paged_triton.paged_attention(
            queries, keys, keys.clone(), step, window=None, scale=0.1, softcap=softcap
        )
    keys = torch.zeros(num_blocks, 8, 16, 128, dtype=torch.bfloat16)
    of = {"window": 128, "scale": 0.1, "sinks": torch.zeros(32, dtype=torch.bfloat16)}
    paged_triton.paged_attention(queries, keys, keys.clone(), step, **of)
    token = torch.empty(1, 8, 21, 128, dtype=torch.bfloat16)
    paged_triton.store(token, token, keys, keys.clone(), step.slots)
    x = torch.empty(64, 4096, dtype=torch.bfloat16)
    float8_triton.rounded_rows(x, 16, largest_exponent=8, mantissa=MANTISSA_OF_LARGEST)
    for num_tokens, outputs in ((1, 6144), (64, 28672)):
        codes = torch.empty(outputs, 4096, dtype=torch.int8)
        quantized_triton.linear_int8(x[:num_tokens], codes, torch.empty(outputs))
        halves = torch.empty(outputs, 2048, dtype=torch.uint8)
        groups = torch.empty(outputs, 4096 // GROUP, dtype=torch.bfloat16)
        quantized_triton.linear_int4(x[:num_tokens], halves, groups)
        if num_tokens == 1:
            quantized_triton.written_out_int4(halves, groups, inputs=4096, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.empty(64, 128256, dtype=dtype)
        draw_triton.draw(logits, None)
        draw_triton.draw(logits, torch.empty(64, 5, dtype=torch.float64))


if __name__ == "__main__":
    whole = partial(compile_for_gpus, whole=True)
    {"interpret": interpret, "compile": compile_for_gpus, "compile all": whole}[sys.argv[1]]()
