"""What do packed, 8-bit and 4-bit matrices save in a decode step, and what do they cost in accuracy?

    python benchmarks/matrices.py --out benchmarks/results

Speed: all linear layers of a 125M Llama in bfloat16, one after the other, for 1 to 256 tokens: the least time
over the rounds, ways interleaved. `plain` is `nn.Linear`, `onednn` the same packed by PyTorch's operator.
Beside it the time in which this machine reads as many bytes, measured in the same rounds.

Accuracy: a byte-level model of 0.8 million parameters, trained here on the source code of Python's standard
library; perplexity per byte of other files of it, with each kind of weights.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from results_file import file_result
from torch import nn
from torch.nn.functional import cross_entropy

from penstock.core.clock import monotonic
from penstock.engine.model_runner.serving_layers import convert, fuse, prepare
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.nn.linear.packed import can_multiply, packed
from penstock.nn.linear.quantized import Int4Linear, Int8Linear

LAYER = ((2304, 768), (768, 768), (4096, 768), (768, 2048))
NUM_LAYERS, VOCAB = 12, 32000
KINDS = ("stored", "bfloat16", "int8", "int4")
LENGTH = 128


class OneDnnLinear(nn.Module):
    """A bfloat16 linear layer that oneDNN has packed: the peer."""

    def __init__(self, linear):
        super().__init__()
        self.in_features = linear.in_features
        self.matrix = torch.ops.mkldnn._reorder_linear_weight(linear.weight, 1)

    def forward(self, x):
        """Apply the layer."""
        return torch.ops.mkldnn._linear_pointwise(x, self.matrix, None, "none", [], "")


def speed(rounds, tokens):
    """Return milliseconds for each number of tokens and kind of matrix."""
    torch.manual_seed(0)
    sizes = [*LAYER * NUM_LAYERS, (VOCAB, 768)]
    plain = [nn.Linear(i, o, bias=False, dtype=torch.bfloat16).requires_grad_(False) for o, i in sizes]
    ways = {"plain": plain}
    for name, make in {
        "packed": packed,
        "int8": Int8Linear,
        "int4": Int4Linear,
        "onednn": OneDnnLinear,
    }.items():
        if name != "onednn" or torch.cpu._is_avx512_bf16_supported():
            ways[name] = [make(layer) for layer in plain]
    read = torch.ones(sum(layer.weight.numel() for layer in plain) // 2)  # as many bytes, in float32
    figures = []
    for count in tokens:
        x = {size: torch.randn(count, size, dtype=torch.bfloat16) for size in (768, 2048)}
        best = dict.fromkeys([*ways, "read"], math.inf)
        for _ in range(rounds):
            for name, layers in ways.items():
                best[name] = min(best[name], seconds(lambda layers=layers, x=x: run(layers, x)))
            best["read"] = min(best["read"], seconds(read.amax))
        figures.append({"tokens": count, **{name: round(1e3 * best[name], 3) for name in best}})
        print(figures[-1], flush=True)
    return figures


def run(layers, x):
    for layer in layers:
        layer(x[layer.in_features])


def seconds(work):
    started = monotonic()
    work()
    return monotonic() - started


def library(part):
    """Return bytes of the standard library: every fourth file is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [file for number, file in enumerate(files) if (number % 4 == 3) == (part == "held-out")]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8)


def trained(steps):
    """Return a model trained on the library's files, in float32."""
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(
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
        served = Llama(model.config).eval().requires_grad_(False)
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
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=512)
    arguments = parser.parse_args()
    result = {
        "threads": torch.get_num_threads(),
        "operators": {bits: can_multiply(bits, torch.zeros(())) for bits in (4, 8, 16)},
        "accuracy": {"steps": arguments.steps, "perplexity": accuracy(arguments.steps, arguments.rows)},
        "milliseconds": speed(arguments.rounds, arguments.tokens),
    }
    file_result(arguments.out, "matrices", result, packages=("torch",))


if __name__ == "__main__":
    main()
