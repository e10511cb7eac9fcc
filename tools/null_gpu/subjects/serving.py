"""Counts of serving: a step of decoding with CUDA graphs, greedy and top-p, of one sequence and of 64.

The shape is an 8B Llama's with two layers. Counts are the means of twenty steps in which all sequences
decode; graphs recorded in them were recorded in mid-service.
"""

import json

import torch
from gpu_parts.serving import random_model, record_graphs, shape_of

from penstock.engine.assemble import engine_of
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request
from penstock.engine.sampling_params import GREEDY, Sampling
from tools.null_gpu.region import Region

LAYERS, STEPS, WARM_UP, PROMPT = 2, 20, 16, 32
MOST = 64
SETTINGS = {"greedy": GREEDY, "top-p": Sampling(temperature=0.8, top_p=0.9)}


def step_counts(engine: Engine, count: int, sampling: Sampling) -> dict[str, object]:
    """Return the counts of a step in which `count` sequences decode."""
    ids = [
        engine.add(
            Request(prompt=tuple(range(3, 3 + PROMPT)), max_tokens=STEPS + WARM_UP + count, sampling=sampling)
        )
        for _ in range(count)
    ]
    decoding: set[int] = set()
    while len(decoding) < count:
        decoding.update(_step(engine))
    for _ in range(WARM_UP):
        _step(engine)
    with Region() as seen:
        for _ in range(STEPS):
            _step(engine)
    for request_id in ids:
        engine.cancel(request_id)
    engine.step()
    found: dict[str, object] = {name: total / STEPS for name, total in seen.totals.items()}
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


def main() -> None:
    """Print the counts of all settings."""
    torch.set_num_threads(1)
    device = torch.device("cuda:0")
    shape = shape_of("8b", is_tiny=False, layers=LAYERS)
    config = EngineConfig(
        prefix_caching=False, weights="stored", compile="off",
        max_sequences=MOST, max_context=4096, cache_gib=2.0,
    )  # fmt: skip
    engine = engine_of(random_model(shape, device), config)
    record_graphs(engine, MOST)
    found = {
        f"serve {name}, {count} at once": step_counts(engine, count, sampling)
        for name, sampling in SETTINGS.items()
        for count in (1, MOST)
    }
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
