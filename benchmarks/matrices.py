"""What do packed, 8-bit and 4-bit matrices save in a decode step, and what do they cost in accuracy?

    python benchmarks/matrices.py --out benchmarks/results

    export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
    export PENSTOCK_NATIVE_BASELINE=x86-64-v3
    python benchmarks/matrices.py --out benchmarks/results

On a machine with other work set OMP_NUM_THREADS=1: CPU seconds are measured then.
The exports are for CPUs without AVX-512, on one that has it.

Speed: all linear layers of a 125M Llama, and those of one block of an 8B Llama, one after the other, for
1 to 512 tokens: the least time over the rounds, ways interleaved. Ours are `float32` and `bfloat16`;
`int8` and `int4`, weight-only, with tokens of bfloat16; the same with tokens of float32; and
`int8_rounded` and `int4_rounded`, which round tokens to 8 bits (`activations="int8"`), on CPUs with VNNI.
`torch_float32` and `torch_bfloat16` are `nn.Linear`, `onednn` the latter packed by PyTorch's operator,
`torch_int8` and `torch_int4` its weight-only products. `times_torch` is how often a way is as fast as
torch's best way to the same answer: with exact tokens of the same dtype, and for fewer bits also more.
`read` is the time in which this machine reads as many bytes as bfloat16 has, measured in the same rounds.

Accuracy: a byte-level model of 0.8 million parameters, trained here on the source code of Python's standard
library; perplexity per byte of other files of it, with each kind of weights.
"""

import argparse
import copy
import math
import sysconfig
from functools import partial
from pathlib import Path
from time import thread_time

import torch
from results_file import file_result
from torch import nn
from torch.nn.functional import cross_entropy

from penstock.core import env
from penstock.core.clock import monotonic
from penstock.engine.model_runner.serving_layers import convert, fuse, prepare
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.linear.adapter_config import GROUP
from penstock.nn.linear.packed import can_multiply, packed
from penstock.nn.linear.quantized import Int4Linear, Int8Linear, multiplies_integers
from penstock.nn.linear.rounding import to_int4, to_int8

LAYERS = {
    "125M": [*((2304, 768), (768, 768), (4096, 768), (768, 2048)) * 12, (32000, 768)],
    "a block of 8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
}
"""Model -> outputs and inputs of its linear layers."""
KINDS = ("stored", "bfloat16", "int8", "int4")
LENGTH = 128
FLAGS = {"avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile"}
"""Of CPUs, that products depend on; those of the machine, whatever is compiled for."""


class OneDnnLinear(nn.Module):
    """A bfloat16 linear layer that oneDNN has packed: the peer."""

    def __init__(self, linear):
        super().__init__()
        self.in_features = linear.in_features
        self.matrix = torch.ops.mkldnn._reorder_linear_weight(linear.weight, 1)

    def forward(self, x):
        """Apply the layer."""
        return torch.ops.mkldnn._linear_pointwise(x, self.matrix, None, "none", [], "")


class TorchInt8Linear(nn.Module):
    """PyTorch's weight-only product of int8."""

    def __init__(self, linear):
        super().__init__()
        self.in_features = linear.in_features
        self.codes, scales = to_int8(linear.weight)
        self.scales = scales.bfloat16()

    def forward(self, x):
        """Apply the layer."""
        return torch._weight_int8pack_mm(x, self.codes, self.scales)


class TorchInt4Linear(nn.Module):
    """PyTorch's weight-only product of int4 with groups."""

    def __init__(self, linear):
        super().__init__()
        self.in_features = linear.in_features
        codes, scales = to_int4(linear.weight)
        self.codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 2)
        self.scales = torch.stack([scales, torch.zeros_like(scales)], 2).transpose(0, 1).contiguous()

    def forward(self, x):
        """Apply the layer."""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, GROUP, self.scales)


OURS = {
    "float32": (torch.float32, packed),
    "int8_of_float32": (torch.float32, Int8Linear),
    "int4_of_float32": (torch.float32, Int4Linear),
    "bfloat16": (torch.bfloat16, packed),
    "int8": (torch.bfloat16, Int8Linear),
    "int4": (torch.bfloat16, Int4Linear),
}
"""Way -> dtype of the tokens, and what makes the layer."""
ROUNDED = {
    "int8_rounded": (torch.bfloat16, partial(Int8Linear, rounds=True)),
    "int4_rounded": (torch.bfloat16, partial(Int4Linear, rounds=True)),
}
"""As `OURS`, for CPUs that multiply integers."""
PEERS = {"int8": ("torch_int8",), "int4": ("torch_int8", "torch_int4")}
"""Bits of our way -> torch's ways to the same answer besides those of more bits."""


def torch_ways():
    """Return PyTorch's ways, as `OURS`."""
    ways = {
        "torch_float32": (torch.float32, lambda layer: layer),
        "torch_bfloat16": (torch.bfloat16, lambda layer: layer),
        "torch_int8": (torch.bfloat16, TorchInt8Linear),
        "torch_int4": (torch.bfloat16, TorchInt4Linear),
    }
    if torch.cpu._is_avx512_bf16_supported() and not env.native_baseline():
        ways["onednn"] = (torch.bfloat16, OneDnnLinear)
    return ways


def speed(model, rounds, tokens):
    """Return milliseconds and ratios to torch for each number of tokens and way."""
    torch.manual_seed(0)
    sizes = LAYERS[model]
    plain = [nn.Linear(i, o, bias=False).requires_grad_(False) for o, i in sizes]
    of_dtype = {torch.float32: plain, torch.bfloat16: [copy.deepcopy(layer).bfloat16() for layer in plain]}
    peers, ours = torch_ways(), OURS | (ROUNDED if multiplies_integers() else {})
    ways = {
        name: (dtype, [make(layer) for layer in of_dtype[dtype]])
        for name, (dtype, make) in (peers | ours).items()
    }
    read = torch.ones(sum(layer.weight.numel() for layer in plain) // 2)  # bytes of bfloat16, in float32
    figures = []
    for count in tokens:
        x = {
            (size, dtype): torch.randn(count, size, dtype=dtype)
            for size in {inputs for _, inputs in sizes}
            for dtype in of_dtype
        }
        best = dict.fromkeys([*ways, "read"], math.inf)
        for _ in range(rounds):
            for name, (dtype, layers) in ways.items():
                best[name] = min(
                    best[name], seconds(lambda layers=layers, x=x, dtype=dtype: run(layers, x, dtype))
                )
            best["read"] = min(best["read"], seconds(read.amax))
        ratios = {name: round(least(best, peers, name) / best[name], 2) for name in ours}
        figures.append(
            {
                "model": model,
                "tokens": count,
                "ms": {name: round(1e3 * best[name], 3) for name in best},
                "times_torch": ratios,
            }
        )
        print(figures[-1], flush=True)
    return figures


def least(best, peers, way):
    """Return the time of torch's best way to what `way` computes."""
    if way.endswith("float32"):
        return best["torch_float32"]
    found = {"torch_float32", "torch_bfloat16", "onednn", *PEERS.get(way.partition("_")[0], ())}
    return min(best[name] for name in peers if name in found)


def run(layers, x, dtype):
    for layer in layers:
        layer(x[layer.in_features, dtype])


def seconds(work):
    started = now()
    work()
    return now() - started


def now():
    """Return the time of the clock: on one thread that of the CPU, which other work leaves as it is."""
    return thread_time() if torch.get_num_threads() == 1 else monotonic()


def library(part):
    """Return bytes of the standard library: every fourth file is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [file for number, file in enumerate(files) if (number % 4 == 3) == (part == "held-out")]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8)


def trained(steps):
    """Return a model trained on the library's files, in float32."""
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )
    text, draws = library("training"), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (16,), generator=draws)
        rows = torch.stack([text[at : at + LENGTH + 1] for at in starts.tolist()]).long()
        cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def perplexity(model, num_rows):
    """Return the perplexity per byte of held-out files."""
    text = library("held-out")
    rows = (
        text[: len(text) // LENGTH * LENGTH]
        .view(-1, LENGTH)[:: max(1, len(text) // LENGTH // num_rows)]
        .long()
    )
    losses = [
        cross_entropy(model.logits(model.hidden(part[:, :-1])).float().flatten(0, 1), part[:, 1:].flatten())
        * len(part)
        for part in rows.split(32)
    ]
    return math.exp(sum(losses) / len(rows))


def accuracy(steps, num_rows):
    """Return perplexities of one model with each kind of weights."""
    model = trained(steps)
    state = model.state_dict()
    figures = {}
    for kind in KINDS:
        served = Decoder(model.config).eval().requires_grad_(False)
        served.load_state_dict(state)
        convert(served, kind)
        fuse(served)
        prepare(served, kind)
        figures["float32" if kind == "stored" else kind] = round(perplexity(served, num_rows), 5)
    print(figures, flush=True)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=20, help="a quarter as many for 8B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--steps", type=int, default=600, help="of training; 0: speed only")
    parser.add_argument("--rows", type=int, default=512)
    arguments = parser.parse_args()
    result = {
        "threads": torch.get_num_threads(),
        "clock": "of the CPU" if torch.get_num_threads() == 1 else "of the wall",
        "compiled_for": env.native_baseline() or "native",
        "torch_for": torch.backends.cpu.get_cpu_capability(),
        "flags": sorted(FLAGS & set(env.cpu_features().split())),
        "operators": can_multiply(torch.zeros(())),
        "multiplies_integers": multiplies_integers(),
        "speed": [
            figures
            for model in arguments.models
            for figures in speed(
                model, arguments.rounds if model == "125M" else -(-arguments.rounds // 4), arguments.tokens
            )
        ],
    }
    if arguments.steps:
        figures = accuracy(arguments.steps, arguments.rows)
        result["accuracy"] = {"steps": arguments.steps, "perplexity": figures}
    name = "-".join(filter(None, ["matrices", env.native_baseline()]))
    file_result(arguments.out, name, result, packages=("torch",))


if __name__ == "__main__":
    main()
