"""Launches of each family's blocks, to compare with Llama's.

Shapes are those of Llama 3.2 1B: at smaller ones the compiler fuses differently. `train` is a compiled
forward and backward pass over a row of 4,096 tokens, `serve` a compiled decode step with its graph. `block`
is half the difference of four layers and two; `rest` is embedding, positions and last norm, in serving also
logits and sampling.
"""

import json

import torch
from tests.families import small_families

from penstock.engine.assemble import engine_of
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.parallel.apply import compile_blocks
from penstock.parallel.config import CompileConfig
from tools.null_gpu.region import Region

FEW, MORE, TOKENS, PROMPT = 2, 4, 4096, 8
SIZES = {
    "vocab_size": 512,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SAME_LAUNCHES = ("biases", "mistral", "qwen2")
"""Families left out: their switches change arguments of Llama's kernels alone."""


def train_launches(config: DecoderConfig, device: torch.device) -> int:
    """Return the launches of a forward and backward pass."""
    with device:
        model = Decoder(config).bfloat16()
    compile_blocks(model, CompileConfig(enabled=True))
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)

    def work() -> None:
        model.zero_grad()
        torch.autograd.backward(model.hidden(ids).sum())

    work()
    with Region() as seen:
        work()
    torch.compiler.reset()
    return seen.totals["launches"]


def serve_launches(config: DecoderConfig, device: torch.device) -> int:
    """Return the launches of a step in which one sequence decodes."""
    with device:
        model = Decoder(config).bfloat16().eval()
    engine = engine_of(
        model, EngineConfig(kernels="reference", max_sequences=1, max_context=64, cache_gib=0.1)
    )
    engine.add(Request(prompt=(1,) * PROMPT, max_tokens=48))
    for _ in range(6):
        engine.step()
    with Region() as seen:
        engine.step()
    engine.close()
    return seen.totals["launches"] + seen.totals["launches_in_graphs"]


def counts_of(name: str, device: torch.device) -> dict[str, float]:
    """Return the launches of a family."""
    found: dict[str, float] = {}
    for what, launches in (("train", train_launches), ("serve", serve_launches)):
        few, more = (
            launches(small_families(**SIZES, num_hidden_layers=n)[name], device) for n in (FEW, MORE)
        )
        block = (more - few) / (MORE - FEW)
        found |= {f"{what}_block": block, f"{what}_rest": few - FEW * block}
    return found


def main() -> None:
    """Print the counts of all families."""
    torch.set_num_threads(1)
    device = torch.device("cuda:0")
    names = [name for name in small_families(**SIZES, num_hidden_layers=FEW) if name not in SAME_LAUNCHES]
    print(json.dumps({f"family {name}": counts_of(name, device) for name in names}))


if __name__ == "__main__":
    main()
