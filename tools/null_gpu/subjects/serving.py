"""Counts of serving: a step of decoding, with CUDA graphs and without, of one sequence and of 64.

The shape is an 8B Llama's with two layers. Counts are the means of twenty steps in which all sequences
decode; graphs recorded in them were recorded in mid-service, and kernels compiled in them were not compiled
at the start. Greedy and top-p steps are graphs; what the others launch kernel by kernel stands in
docs/limits.md.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_parts.serving import random_model, shape_of
from safetensors.torch import save_file

from penstock.engine.assemble import engine_of
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request
from penstock.engine.sampling_params import GREEDY, Sampling
from tools.null_gpu.region import Region
from tools.null_gpu.subjects.kernels import ours

LAYERS, STEPS, WARM_UP, PROMPT = 2, 20, 16, 32
MOST = 64
SETTINGS = {"greedy": GREEDY, "top-p": Sampling(temperature=0.8, top_p=0.9)}
PENALTY = Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.5)
RANK = 16  # of the adapter
PIECE = 512  # tokens of a prompt in a step


def step_counts(
    engine: Engine,
    count: int,
    sampling: Sampling,
    *,
    adapter: str | None = None,
    beside: int = 0,
    warm_up: int = WARM_UP,
) -> dict[str, object]:
    """Return the counts of a step in which `count` sequences decode.

    Args:
        beside: prompts of which each step computes a piece.
    """
    num_tokens = 8 * (STEPS + warm_up + count)  # drafts may all be accepted
    ids = [
        engine.add(
            Request(
                prompt=tuple(range(3, 3 + PROMPT)), max_tokens=num_tokens, sampling=sampling, adapter=adapter
            )
        )
        for _ in range(count)
    ]
    decoding: set[int] = set()
    while len(decoding) < count:
        decoding.update(_step(engine))
    ids += [engine.add(Request(prompt=tuple(range(3900)), max_tokens=1)) for _ in range(beside)]
    known = sum(1 for _ in ours())
    for _ in range(warm_up):
        _step(engine)
    with Region() as seen:
        for _ in range(STEPS):
            seen.begin_step()
            _step(engine)
    for request_id in ids:
        engine.cancel(request_id)
    engine.step()
    found: dict[str, object] = {name: total / STEPS for name, total in seen.totals.items()}
    if seen.totals["graph_launches"] == STEPS:
        found["early_waits"] = seen.early_waits / STEPS
    found["kernels_compiled"] = sum(1 for _ in ours()) - known
    found["graphs_recorded"] = seen.totals["graphs_recorded"]
    found["kernels"] = {name[:140]: n / STEPS for name, n in seen.kernels.most_common(20)}
    found["waits_at"] = {place: n / STEPS for place, n in seen.waits.items()}
    return found


def _step(engine: Engine) -> set[int]:
    """Return the requests that got a token.

    Raises:
        RuntimeError: the step failed.
    """
    pieces = engine.step()
    if failed := [piece.error for piece in pieces if piece.error is not None]:
        raise RuntimeError(failed[0])
    return {piece.request_id for piece in pieces if piece.token_ids}


def an_engine(device: torch.device, **options: Any) -> Engine:  # Any: fields of EngineConfig
    """Return an engine of random numbers as a server opens it: with compiled blocks and graphs."""
    shape = shape_of("8b", is_tiny=False, layers=LAYERS)
    config = EngineConfig(
        prefix_caching=False, kernels="reference",
        max_sequences=MOST, max_context=4096, cache_gib=2.0, **options,
    )  # fmt: skip
    return engine_of(random_model(shape, device), config)


def an_adapter(folder: Path) -> Path:
    """Write an adapter of query and value, as PEFT does; return its folder."""
    shape = shape_of("8b", is_tiny=False, layers=LAYERS)
    outputs = {"q_proj": shape.hidden_size, "v_proj": shape.key_value_heads * shape.size_of_head}
    tensors = {}
    for layer in range(LAYERS):
        for name, size in outputs.items():
            of = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{of}.lora_A.weight"] = torch.zeros(RANK, shape.hidden_size)
            tensors[f"{of}.lora_B.weight"] = torch.zeros(size, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*outputs]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def graph_counts(device: torch.device) -> dict[str, object]:
    """Return the counts of steps that are graphs, and of an engine with graphs whose steps are not."""
    engine = an_engine(device, tokens_per_step=PIECE)
    found: dict[str, object] = {
        f"serve {name}, {count} at once": step_counts(engine, count, sampling)
        for name, sampling in SETTINGS.items()
        for count in (1, MOST)
    }
    found["serve changed logits, 1 at once"] = step_counts(engine, 1, PENALTY, warm_up=0)
    found["serve beside a prompt, 1 at once"] = step_counts(engine, 1, GREEDY, beside=4, warm_up=1)
    engine.close()
    return found


def main() -> None:
    """Print the counts of all settings."""
    torch.set_num_threads(1)
    device = torch.device("cuda:0")
    found = graph_counts(device)
    with tempfile.TemporaryDirectory() as folder:
        engine = an_engine(device, adapters={"a": an_adapter(Path(folder))})
    found["serve an adapter, 1 at once"] = step_counts(engine, 1, GREEDY, adapter="a")
    engine.close()
    engine = an_engine(device, drafts="ngram", adapt_drafts=False)
    found["serve drafts, 1 at once"] = step_counts(engine, 1, GREEDY)
    engine.close()
    engine = an_engine(device, batch_invariant=True)
    found["serve batch-invariant, 1 at once"] = step_counts(engine, 1, GREEDY)
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
