"""Kernels of one GPU beside torch's own, FlashInfer's and torchao's where they are installed.

Shapes are those of an 8B Llama's layer. A figure is the roofline's time, by the bytes that must be read or
the FLOP that must be computed and the speeds measured in the same run, over the kernel's: only a cache gives
more than 100%. A verdict is the time of the best other way over ours. Calls are replayed as CUDA graphs, so
that Python's time does not count; those that wait for the device cannot be, and are timed as they are.
"""

import importlib.util
import inspect
import math
import sys
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gpu_parts.instruments import (  # noqa: E402
    GIB,
    attempt,
    canary,
    free,
    matrix_flops,
    memory_bytes_s,
    peak_bytes,
    reset_peak,
    run_cases,
    set_up,
    timed,
)
from gpu_parts.machine import is_null_gpu  # noqa: E402
from gpu_parts.part import open_part  # noqa: E402
from penstock.core import clock  # noqa: E402
from penstock.devices import kernel_choice  # noqa: E402
from penstock.engine.sampling.filters import choose  # noqa: E402
from penstock.engine.sampling_params import Sampling  # noqa: E402
from penstock.nn.cross_entropy import cross_entropy  # noqa: E402
from penstock.nn.head import OutputHead  # noqa: E402
from penstock.nn.kernels.choose import choose_kernel, operation_of  # noqa: E402
from penstock.nn.kernels.layout import AttentionLayout, starts_of, visibility_mask  # noqa: E402
from penstock.nn.kernels.paged import DECODE, PROMPTS, Paged  # noqa: E402
from penstock.nn.kernels.pages import PagedStep, to_pages  # noqa: E402
from penstock.nn.kernels.sdpa import Masked  # noqa: E402
from penstock.nn.kernels.trials import Heads, attention_operations, page_operations  # noqa: E402
from penstock.nn.linear.float8 import RECIPES, has_native  # noqa: E402
from penstock.nn.linear.quantized import Float8Linear, Int4Linear, Int8Linear  # noqa: E402
from penstock.nn.linear.quantized import operation_of as operation_of_product  # noqa: E402
from penstock.nn.linear.rounding import GROUP  # noqa: E402
from penstock.nn.linear.trials import product_operations  # noqa: E402

OURS = "ours"
VERDICT_TARGET = 0.95  # of the best other way's speed: less than this is no noise
CACHED_BYTES = 2 * 10**8  # calls touch more memory than this in turn: a few times the second-level cache
COMPILE_S = 14.0
BLOCK = 16  # positions of a page


def causal_pairs(ends):
    """Return how many pairs of tokens see each other in documents with such ends; a token half of itself.

    >>> causal_pairs([0, 2, 6])
    10.0
    """
    return sum((past - first) ** 2 / 2 for first, past in pairwise(ends))


def stored_bytes(bits, inputs):
    """Return the bytes of an output's row of a matrix, with its scales.

    >>> stored_bytes("int8", 64), stored_bytes("float8", 64), stored_bytes("int4", 64)
    (68, 65, 36)
    """
    return {"int8": inputs + 4, "float8": inputs + 1, "int4": inputs // 2 + 2 * inputs // GROUP}[bits]


class Kernels:
    """The rows of this part."""

    def __init__(self, part):
        self.part, self.device, self.is_tiny = part, part.device, part.is_tiny
        self._kernels = {}
        self._peak_gib = {}  # by name and way: of the tensors while it was timed, its inputs too
        if self.is_tiny:
            self.heads, self.kv_heads, self.dim, self.hidden, self.wide = 4, 2, 16, 64, 128
            self.vocabulary, self.rows, self.length, self.document = 512, 2, 32, 9
            self.contexts = ((4, 40), (1, 70))
        else:
            self.heads, self.kv_heads, self.dim, self.hidden, self.wide = 32, 8, 128, 4096, 28672
            self.vocabulary, self.rows, self.length, self.document = 128_256, 2, 4096, 900
            self.contexts = ((64, 2048), (1, 16384))

    @cached_property
    def read_bytes_s(self):
        """Bytes a second that the memory gives to a sum; filed when it is first asked for."""
        speed = memory_bytes_s(self.device, is_tiny=self.is_tiny)["read"]
        self.part.measured("memory, read", speed / 1e12, "TB/s")
        return speed

    @cached_property
    def flops(self):
        """FLOP/s that products of matrices reach; filed when they are first asked for."""
        flops = matrix_flops(self.device, torch.bfloat16, is_tiny=self.is_tiny)
        self.part.measured("matrix products, bfloat16", flops / 1e12, "TFLOP/s")
        return flops

    def compare(self, name, ways, *, read=0.0, flops=0.0, as_graph=True, kernel=None):
        """Time some ways to compute one thing; file each and the verdict.

        Args:
            ways: name -> function that returns the calls to time; ours are first. What compiles says so by
                a name that ends with "compiled".
            read: bytes that must be read, of one call.
            flops: that must be computed.
            as_graph: False for all, where one of them waits for the device.
            kernel: name of the kernel that ours use, where there are several.
        """
        roofline_s = max(read / self.read_bytes_s, flops / self.flops)
        taken = self._timed(name, ways, as_graph=as_graph)
        is_graph = as_graph and all(one.is_graph for one in taken.values())
        if not is_graph and any(one.is_graph for one in taken.values()):
            taken = self._timed(name, ways, as_graph=False)  # one cannot be captured: none is
        found = {way: one.seconds for way, one in taken.items()}
        for way, seconds in found.items():
            self.part.measured(
                f"{name}: {way}", 100 * roofline_s / seconds, "% of the roofline",
                us=1e6 * seconds, read_bytes=read, flops=flops, as_graph=is_graph,
                **({"kernel": kernel} if kernel and way == OURS else {}),
                peak_gib=self._peak_gib[name, way],
            )  # fmt: skip
        others = [way for way in found if not way.startswith(OURS)]
        if OURS in found and others:
            best = min(others, key=lambda way: found[way])
            self.part.measured(
                f"{name}: ours / best of others", found[best] / found[OURS], "times",
                at_least=VERDICT_TARGET, best=best, us={way: 1e6 * s for way, s in found.items()},
            )  # fmt: skip

    def normal(self, *shape, grad=False):
        """Return normal bfloat16 numbers on the device."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16).requires_grad_(grad)

    def copies(self, num_bytes):
        """Return over how many copies calls go, so that no cache holds them."""
        return 1 if self.is_tiny else max(1, math.ceil(CACHED_BYTES / num_bytes))

    def chosen(self, name, operations):
        """Return operation -> kernel as the choice by measurement picks it for a row.

        Under the null GPU, and where no measurement is possible, that is the first candidate.

        Args:
            name: of the operation.
            operations: operations with the row's shapes, one of that name. Candidates that must compile are
                not measured.
        """
        operation = next(one for one in operations if one.name == name)
        if operation.key not in self._kernels:
            found = None
            if len(operation.kernels) > 1 and not is_null_gpu():
                measure = partial(kernel_choice.measure, operation, self.device)
                found = attempt(self.part, f"choice of {operation.key}", measure, needs_s=2.0)
                free(self.device)
            self._kernels[operation.key] = found.kernel if found else operation.first
        return {name: self._kernels[operation.key]}

    @property
    def sizes(self):
        """Sizes of the attention layers."""
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.dim}
        return Heads(**shape, dtype=torch.bfloat16, device=self.device)

    # attention of training and of prompts

    def attention(self, *, packed, backward):
        """Attention over rows of one document, or of several."""
        rows, length = self.rows, self.length
        ends = [*range(0, rows * length, self.document if packed else length), rows * length]
        ends = sorted({*ends, *range(0, rows * length + 1, length)})
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=self.device)
        layout = AttentionLayout(batch=rows, seq_len=length, cu_seqlens=cu_seqlens)
        given = (
            layout if packed else replace(layout, cu_seqlens=None)
        )  # as training gives rows of one document
        flops = 4 * causal_pairs(ends) * self.heads * self.dim * (3.5 if backward else 1)
        scale = self.dim**-0.5

        def timed(attend):
            def make():
                q = self.normal(rows, length, self.heads, self.dim).transpose(1, 2)
                k, v = (self.normal(rows, length, self.kv_heads, self.dim).transpose(1, 2) for _ in range(2))
                q, k, v = (t.detach().requires_grad_(backward) for t in (q, k, v))
                if not backward:
                    return [partial(attend, q, k, v)]
                slope = torch.ones_like(attend(q, k, v))
                return [lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), slope)]

            return make

        operation = operation_of(given)
        kernels = self.chosen(operation, attention_operations(self.sizes, rows=rows, length=length))

        def ours():
            how = {"device": self.device, "dtype": torch.bfloat16, "head_dim": self.dim}
            return timed(partial(choose_kernel(given, **how, kernels=kernels), scale=scale))()

        def dense(q, k, v):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def cudnn(q, k, v):
            with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION):
                return dense(q, k, v)

        ways = {OURS: ours}
        if packed:
            ways["SDPA with a mask"] = lambda: timed(
                partial(Masked(visibility_mask(layout, device=self.device)), scale=scale)
            )()
        else:
            ways |= {"SDPA": timed(dense), "SDPA by cuDNN": timed(cudnn)}
        if importlib.util.find_spec("flashinfer") and not backward and not packed:
            ways["FlashInfer"] = self._flashinfer_prefill
        ways["FlexAttention, compiled"] = lambda: timed(self._flex(layout))()
        words = "packed documents" if packed else "whole rows"
        self.compare(
            f"attention, {words}, {'forward and backward' if backward else 'forward'}",
            ways,
            flops=flops,
            kernel=kernels[operation],
        )

    def _flex(self, layout):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        starts = starts_of(layout.cu_seqlens, layout.batch * layout.seq_len)
        starts = starts.view(layout.batch, layout.seq_len)

        def sees(row, _, query, key):
            return (key <= query) & (starts[row, query] == starts[row, key])

        mask = create_block_mask(
            sees, layout.batch, None, layout.seq_len, layout.seq_len, device=str(self.device)
        )
        compiled = torch.compile(flex_attention, dynamic=False)
        return partial(compiled, block_mask=mask, enable_gqa=True)

    def _flashinfer_prefill(self):
        import flashinfer

        q = self.normal(self.rows, self.length, self.heads, self.dim)
        k, v = (self.normal(self.rows, self.length, self.kv_heads, self.dim) for _ in range(2))

        def call():
            for row in range(self.rows):
                flashinfer.single_prefill_with_kv_cache(q[row], k[row], v[row], causal=True)

        return [call]

    # attention over pages

    def _pages(self, sequences, length, *, dtype, new=1):
        """Return (queries [t, h, d], keys, values, step) of `new` tokens of each sequence."""
        blocks = -(-length // BLOCK)
        tables = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32)
        tables = tables.reshape(sequences, blocks)
        last = np.arange(length - new, length)
        step = PagedStep.from_arrays(
            slots=(tables[:, last // BLOCK].astype(np.int64) * BLOCK + last % BLOCK).reshape(-1),
            query_starts=np.arange(0, sequences * new + 1, new, dtype=np.int32),
            lengths=np.full(sequences, length, np.int32),
            block_tables=tables,
            device=self.device,
        )
        keys, values = (
            to_pages(self.normal(sequences * blocks, self.kv_heads, BLOCK, self.dim), dtype) for _ in range(2)
        )
        return self.normal(sequences * new, self.heads, self.dim), keys, values, step

    def _page_operations(self, dtype, *, sequences, context):
        return page_operations(
            self.sizes, pages=dtype, block_size=BLOCK, sequences=sequences, prompt=context, context=context
        )

    def decode(self, sequences, length):
        """Attention of one token of each sequence over its pages."""
        scale, numbers = self.dim**-0.5, 2 * sequences * length * self.kv_heads
        read = {torch.bfloat16: 2 * numbers * self.dim, torch.int8: numbers * (self.dim + 4)}

        def paged(dtype, kernels):
            def make():
                made = [self._pages(sequences, length, dtype=dtype) for _ in range(self.copies(read[dtype]))]
                return [
                    partial(Paged(replace(step, kernels=kernels)).attend, q, k, v, scale=scale)
                    for q, k, v, step in made
                ]

            return make

        def compare(words, dtype, others):
            kernels = self.chosen(DECODE, self._page_operations(dtype, sequences=sequences, context=length))
            ways = {OURS: paged(dtype, kernels), **others}
            self.compare(f"{name}, {words}", ways, read=read[dtype], kernel=kernels[DECODE])

        def contiguous():
            calls = []
            for _ in range(self.copies(read[torch.bfloat16])):
                q = self.normal(sequences, self.heads, 1, self.dim)
                k, v = (self.normal(sequences, self.kv_heads, length, self.dim) for _ in range(2))
                calls.append(partial(functional.scaled_dot_product_attention, q, k, v, enable_gqa=True))
            return calls

        name = f"attention over pages, {sequences} x {length} tokens"
        others, copies = {"SDPA without pages": contiguous}, self.copies(read[torch.bfloat16])
        if self.device.type == "cuda":
            others["torch's varlen over pages"] = partial(self._varlen_pages, sequences, length, copies)
        if importlib.util.find_spec("flashinfer"):
            decode = partial(self._flashinfer_decode, sequences, length, copies)
            others["FlashInfer"] = partial(decode, has_tensor_cores=False)
            others["FlashInfer, tensor cores"] = partial(decode, has_tensor_cores=True)
        compare("16 bits", torch.bfloat16, others)
        compare("8 bits", torch.int8, {})

    def _timed(self, name, ways, *, as_graph):
        """Return way -> its time, of those that can be computed here."""
        found = {}
        for way, make in ways.items():

            def work(make=make):
                reset_peak(self.device)
                return timed(self.device, make(), for_s=0.005 if self.is_tiny else 0.2, as_graph=as_graph)

            is_slow = way.endswith("compiled") and not self.is_tiny
            one = attempt(
                self.part,
                f"{name}: {way}",
                work,
                needs_s=COMPILE_S if is_slow else 1.5,
                is_optional=not way.startswith(OURS),
            )
            self._peak_gib[name, way] = peak_bytes(self.device) / GIB
            free(self.device)
            if one is not None:
                found[way] = one
        return found

    def _varlen_pages(self, sequences, length, copies):
        from torch.nn.attention.varlen import varlen_attn

        if "block_table" not in inspect.signature(varlen_attn).parameters:
            raise NotImplementedError("this torch's varlen_attn takes no pages")
        page, integers = 256, {"dtype": torch.int32, "device": self.device}
        blocks = -(-length // page)
        tables = torch.randperm(sequences * blocks, device=self.device).int().view(sequences, blocks)
        starts, lengths = (
            torch.arange(sequences + 1, **integers),
            torch.full((sequences,), length, **integers),
        )
        options = {"seqused_k": lengths, "block_table": tables, "enable_gqa": True}
        attend = torch.no_grad()(partial(varlen_attn, **options))
        calls = []
        for _ in range(copies):
            q = self.normal(sequences, self.heads, self.dim)
            k, v = (self.normal(sequences * blocks, page, self.kv_heads, self.dim) for _ in range(2))
            calls.append(partial(attend, q, k, v, starts, None, 1, length))
        return calls

    def _flashinfer_decode(self, sequences, length, copies, *, has_tensor_cores):
        return [
            self._flashinfer_call(sequences, length, has_tensor_cores=has_tensor_cores) for _ in range(copies)
        ]

    def _flashinfer_call(self, sequences, length, *, has_tensor_cores):
        import flashinfer

        q, k, v, step = self._pages(sequences, length, dtype=torch.bfloat16)
        room = torch.empty(2**27, dtype=torch.uint8, device=self.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            room, "HND", use_tensor_cores=has_tensor_cores
        )
        blocks = step.block_tables.shape[1]
        integers = {"dtype": torch.int32, "device": self.device}
        wrapper.plan(
            torch.arange(0, sequences * blocks + 1, blocks, **integers),
            step.block_tables.flatten(),
            torch.full((sequences,), (length - 1) % BLOCK + 1, **integers),
            self.heads, self.kv_heads, self.dim, BLOCK,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return partial(wrapper.run, q, (k, v))

    def prompt_over_pages(self):
        """Attention of a prompt over the pages that it has just been written to."""
        length = self.length // 2
        flops = 2 * length**2 * self.heads * self.dim
        kernels = self.chosen(PROMPTS, self._page_operations(torch.bfloat16, sequences=1, context=length))

        def ours():
            q, k, v, step = self._pages(1, length, dtype=torch.bfloat16, new=length)
            return [partial(Paged(replace(step, kernels=kernels)).attend, q, k, v, scale=self.dim**-0.5)]

        def contiguous():
            q = self.normal(1, self.heads, length, self.dim)
            k, v = (self.normal(1, self.kv_heads, length, self.dim) for _ in range(2))
            return [
                partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
            ]

        self.compare(
            f"attention over pages, a prompt of {length} tokens",
            {OURS: ours, "SDPA without pages": contiguous},
            flops=flops,
            kernel=kernels[PROMPTS],
        )

    # products with matrices of fewer bits

    def product(self, bits, tokens):
        """Few tokens times a matrix of 8 or 4 bits, or of float8."""
        inputs, outputs = self.hidden, self.wide
        kind = {"int8": Int8Linear, "int4": Int4Linear, "float8": partial(Float8Linear, is_native=True)}[bits]
        read = outputs * stored_bytes(bits, inputs)
        name = f"{tokens} tokens times {bits}, {outputs} x {inputs}"
        operation = operation_of_product(bits, tokens)
        sizes = {"outputs": outputs, "inputs": inputs, "dtype": torch.bfloat16, "device": self.device}
        operations = product_operations(bits, **sizes)  # none where there is no Triton
        kernels = self.chosen(operation, operations) if operations else {}

        def plain_layer():
            layer = nn.Linear(inputs, outputs, bias=False, device=self.device, dtype=torch.bfloat16)
            return layer.requires_grad_(False)

        def layers(make, num_bytes):
            def calls():
                x = self.normal(tokens, inputs)
                return [partial(make(plain_layer()), x) for _ in range(self.copies(num_bytes))]

            return calls

        others = {"bfloat16 by torch": layers(lambda layer: layer, 2 * inputs * outputs)}
        if bits == "int8":
            others["torch._weight_int8pack_mm"] = layers(_int8_by_torch, read)
        if bits == "int4" and not importlib.util.find_spec("mslk"):
            why = "it needs mslk, which is not installed: the best other way is bfloat16 by torch"
            self.part.skipped(f"{name}: torchao, compiled", why)
        elif importlib.util.find_spec("torchao"):
            others["torchao, compiled"] = layers(partial(_by_torchao, bits), read)
        self.compare(
            name,
            {OURS: layers(lambda layer: kind(layer).use(kernels), read), **others},
            read=read,
            kernel=kernels.get(operation),
        )

    def choice(self):
        """What a device's first start chooses, for the layers of an 8B Llama in bfloat16 and in int4."""
        if is_null_gpu():
            self.part.skipped("choice of kernels", "the null GPU computes nothing that could be right")
            return
        sizes, context = self.sizes, min(2048, self.length)
        operations = [
            *attention_operations(sizes, rows=self.rows, length=self.length),
            *page_operations(
                sizes, pages=torch.bfloat16, block_size=BLOCK, sequences=16, prompt=context, context=context
            ),
            *(
                one
                for bits in ("int4", "float8")
                for one in product_operations(
                    bits, outputs=self.wide, inputs=self.hidden, dtype=torch.bfloat16, device=self.device
                )
            ),
        ]
        began = clock.monotonic()
        rows = {one.name: kernel_choice.measure(one, self.device) for one in operations}
        self.part.measured(
            "choice of kernels", clock.monotonic() - began, "s", at_most=kernel_choice.FIRST_START_S
        )
        for name, row in rows.items():
            for kernel, us in row.us.items():
                self.part.measured(f"choice, {name}: {kernel}", us, "us", is_chosen=kernel == row.kernel)
            for kernel, why in row.out.items():
                self.part.skipped(f"choice, {name}: {kernel}", why)

    # loss and sampling

    def loss(self):
        """Cross entropy from hidden states, forward and backward."""
        tokens = self.rows * self.length
        flops = 3 * 2 * tokens * self.hidden * self.vocabulary

        def inputs():
            hidden = self.normal(tokens, self.hidden, grad=True)
            weight = (0.02 * self.normal(self.vocabulary, self.hidden)).requires_grad_()
            return hidden, weight, torch.randint(0, self.vocabulary, (tokens,), device=self.device)

        def timed(loss_of):
            def make():
                hidden, weight, labels = inputs()
                return [lambda: torch.autograd.grad(loss_of(hidden, weight, labels), (hidden, weight))]

            return make

        def ours(hidden, weight, labels, *, tokens_at_once=None):
            return cross_entropy(hidden, OutputHead(weight), labels, tokens_at_once=tokens_at_once)[0]

        def plain(hidden, weight, labels):
            return functional.cross_entropy(
                functional.linear(hidden, weight).float(), labels, reduction="sum"
            )

        ways = {OURS: timed(ours), "torch": timed(plain)}
        for at_once in (1024, 4096):
            ways[f"{OURS}, {at_once} tokens at once"] = timed(partial(ours, tokens_at_once=at_once))
        if hasattr(functional, "linear_cross_entropy"):
            ways["torch's fused"] = timed(partial(functional.linear_cross_entropy, reduction="sum"))
        ways["torch, compiled"] = lambda: timed(torch.compile(plain, dynamic=False))()
        self.compare(f"loss of {tokens} tokens, {self.vocabulary} ids", ways, flops=flops, as_graph=False)

    def sampling(self, count):
        """Draws of one token for each of some rows of logits."""
        numbers = np.random.default_rng(0).random(count).tolist()
        settings = [Sampling(temperature=0.8, top_p=0.9)] * count
        logits = 3 * torch.randn(count, self.vocabulary, device=self.device)
        read = logits.nbytes

        def sorted_by_torch():
            probabilities = torch.softmax(logits / 0.8, -1)
            ordered, ids = probabilities.sort(descending=True)
            kept = ordered.where(ordered.cumsum(-1) - ordered < 0.9, 0)
            return ids.gather(1, torch.multinomial(kept, 1))

        def by_flashinfer():
            import flashinfer

            return [
                lambda: flashinfer.sampling.top_p_sampling_from_probs(torch.softmax(logits / 0.8, -1), 0.9)
            ]

        self.compare(
            f"the likeliest of {count} rows",
            {OURS: lambda: [partial(choose, logits, None)], "torch": lambda: [partial(logits.argmax, -1)]},
            read=read,
        )
        others = {"torch": lambda: [sorted_by_torch]}
        if importlib.util.find_spec("flashinfer"):
            others["FlashInfer"] = by_flashinfer
        self.compare(
            f"top-p draws of {count} rows",
            {OURS: lambda: [partial(choose, logits, settings, numbers)], **others},
            read=read,
            as_graph=False,
        )


def _int8_by_torch(layer):
    scales = layer.weight.float().abs().amax(1) / 127
    codes = (layer.weight.float() / scales[:, None]).round().to(torch.int8)
    return lambda x: torch._weight_int8pack_mm(x, codes, scales.to(x.dtype))


def _by_torchao(bits, layer):
    from torchao import quantization

    config = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int4": quantization.Int4WeightOnlyConfig,
        "float8": quantization.Float8DynamicActivationFloat8WeightConfig,
    }[bits]
    quantization.quantize_(layer, config())
    return torch.compile(layer, dynamic=False)


def main():
    part = open_part("kernels", __doc__.partition("\n")[0])
    set_up(part.device, compiles=False)
    rows = Kernels(part)
    tokens = (1, 4) if part.is_tiny else (1, 64)

    def each(*works):
        def run():
            for name, measure in works:
                attempt(part, name, measure)

        return run

    def products(bits):
        if bits == "float8" and not has_native(RECIPES["float8_rowwise"], part.device.type):
            return partial(part.skipped, "tokens times float8", "the device has no float8 instructions")
        return each(*((f"{n} tokens times {bits}", partial(rows.product, bits, n)) for n in tokens))

    run_cases(
        part,
        {
            "kernels-canary": lambda: canary(part, lambda tried: Kernels(tried).sampling(4)),
            "attention": each(
                *(
                    (
                        f"attention {packed} {backward}",
                        partial(rows.attention, packed=packed, backward=backward),
                    )
                    for packed in (False, True)
                    for backward in (True, False)
                )
            ),
            "loss": each(("loss", rows.loss)),
            "int4": products("int4"),
            "float8": products("float8"),
            "draws": each(("sampling", partial(rows.sampling, tokens[-1]))),
            "pages": each(
                *(("attention over pages", partial(rows.decode, *context)) for context in rows.contexts),
                ("attention of a prompt", rows.prompt_over_pages),
            ),
            "int8": products("int8"),
            "choice": each(("choice of kernels", rows.choice)),
        },
    )


if __name__ == "__main__":
    main()
