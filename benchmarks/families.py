"""Is each family as fast as Llama of the same shape, but for what its switches add?

    OMP_NUM_THREADS=1 python benchmarks/families.py --out benchmarks/results

Shape: Llama 3.2 1B, with `--layers` of its 16 layers and a vocabulary of 32,768. The weights are arbitrary.

`decode`: a step of the C++ operators, bfloat16, for 1 and for 16 requests of 512 tokens. `bytes` and `flops`
are those of the family's step over Llama's: matrices and visible keys and values are read, and multiplied. A
step may take `BOUNDS["decode"]` times the larger of the two, of which one that is below 1 counts as 1.

`train`: forward and backward pass of two compiled blocks, float32, over 256 tokens; `flops` likewise. It may
take `BOUNDS["train"]` times that.

Times are CPU seconds of one thread, the least of the rounds; the family and Llama take turns. `llama again`
is a second Llama over the first: differences as small as its say nothing.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from time import thread_time

import numpy as np
import torch
from results_file import file_result

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the shapes of the tests

from tests.tiny_models import of_every_family

from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.workers.model_shard import part_of
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import ALONE
from penstock.models.family.config_json import config_of
from penstock.parallel.apply import compile_blocks
from penstock.parallel.config import CompileConfig

SIZES = {
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
CONTEXT, BLOCK_SIZE, WINDOW = 512, 16, 256
REQUESTS = (1, 16)
TRAIN_LAYERS, TRAIN_TOKENS = 2, 256
CPU = torch.device("cpu")
BOUNDS = {"decode": 1.05, "train": 1.03}


def configs(layers):
    """Return name -> config of each family, all of one shape; `llama again` is the measure of noise."""
    stored = of_every_family(**SIZES, num_hidden_layers=layers)
    stored["plain llama"] = stored.pop("llama-tied")
    found = {name: of_one_shape(config_of(config.to_dict())) for name, config in stored.items()}
    return {**found, "llama again": found["plain llama"]}


def of_one_shape(config):
    """Return a config with heads of one size, one window and an output matrix of its own."""
    shape = {"head_dim": SIZES["hidden_size"] // SIZES["num_attention_heads"], "tie_word_embeddings": False}
    return replace(config, **shape, **({"sliding_window": WINDOW} if config.sliding_window else {}))


def network(config, dtype):
    """Return a network of small weights that are not all alike."""
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    model = model.to_empty(device=CPU)
    pattern = torch.randn(4099) * 0.02
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        flat.copy_(pattern.to(dtype).repeat(-(-flat.numel() // pattern.numel()))[: flat.numel()])
    return model


def decoder_of(config):
    """Return work(requests), a decode step of the C++ operators."""
    model = network(config, torch.bfloat16).eval()
    asked = EngineConfig(weights="stored", device="cpu", max_context=2 * CONTEXT)
    part = part_of(model, asked, whole=config, place=ALONE, device=CPU)
    blocks = -(-(CONTEXT + 1) // BLOCK_SIZE)
    total = len(part.groups) * max(REQUESTS) * blocks
    runner = part.runner(num_blocks=total, block_size=BLOCK_SIZE)

    def work(requests):
        runner.run(batch_of(requests, blocks, groups=len(part.groups)))

    work(1)
    assert runner._native is not None, f"{config.model_type} is not computed by the C++ operators"
    return work


def batch_of(requests, blocks, *, groups):
    """Return a step in which each request computes its token number CONTEXT."""
    tables = np.arange(groups * requests * blocks, dtype=np.int32).reshape(groups, requests, blocks)
    rows = np.arange(requests)
    return StepBatch(
        token_ids=rows % SIZES["vocab_size"],
        positions=np.full(requests, CONTEXT),
        slots=tables[:, :, CONTEXT // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + CONTEXT % BLOCK_SIZE,
        query_starts=np.arange(requests + 1, dtype=np.int32),
        lengths=np.full(requests, CONTEXT + 1, np.int32),
        block_tables=tables,
        logit_rows=rows,
        adapters=np.full(requests, -1, np.int32),
    )


def trainer_of(config):
    """Return work(), a forward and backward pass of compiled blocks."""
    model = network(replace(config, **of_layers(config, TRAIN_LAYERS)), torch.float32)
    compile_blocks(model, CompileConfig(enabled=True))
    ids = torch.arange(TRAIN_TOKENS)[None] % SIZES["vocab_size"]

    def work():
        model.hidden(ids).square().mean().backward()
        model.zero_grad()

    work()
    return work


def of_layers(config, layers):
    """Return the fields of a config that have a value for each layer, of fewer layers."""
    own = {name: getattr(config, name) for name in ("layer_types", "layer_rope_theta")}
    cut = {name: values[:layers] for name, values in own.items() if values is not None}
    return {"num_hidden_layers": layers, **cut}


def step_flops(config, requests):
    """Return the products of a decode step."""
    keys = sum(min(window or CONTEXT + 1, CONTEXT + 1) for window in config.windows)
    matrices = config.num_parameters - config.vocab_size * config.hidden_size
    return requests * (2 * matrices + 4 * config.num_attention_heads * config.size_of_head * keys)


def step_bytes(config, requests):
    """Return what a decode step reads in bfloat16: matrices once, keys and values of each request."""
    keys = sum(min(window or CONTEXT + 1, CONTEXT + 1) for window in config.windows)
    matrices = config.num_parameters - config.vocab_size * config.hidden_size
    return 2 * matrices + requests * 4 * config.key_value_heads * config.size_of_head * keys


def train_flops(config):
    """Return the products of a forward and backward pass of a token through two blocks."""
    few = replace(config, **of_layers(config, TRAIN_LAYERS))
    return few.flops_per_token(TRAIN_TOKENS) - 6 * few.vocab_size * few.hidden_size


def least_seconds(works, rounds):
    """Return name -> the least CPU seconds of a call, in turns."""
    found = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = thread_time()
            work()
            found[name].append(thread_time() - began)
    return {name: min(seconds) for name, seconds in found.items()}


def decode_rows(name, config, llama, of_llama, rounds):
    """Return the rows of a family's decode steps."""
    work = decoder_of(config)
    rows = []
    for requests in REQUESTS:
        works = {"ours": lambda n=requests: work(n), "llama": lambda n=requests: of_llama(n)}
        seconds = least_seconds(works, rounds)
        added = {
            "bytes": step_bytes(config, requests) / step_bytes(llama, requests),
            "flops": step_flops(config, requests) / step_flops(llama, requests),
        }
        rows.append(row(f"decode {requests}", name, seconds, added))
    return rows


def row(what, name, seconds, added):
    """Return what is filed of one comparison."""
    ratio, bound = seconds["ours"] / seconds["llama"], BOUNDS[what.split()[0]]
    found = {
        "what": what,
        "family": name,
        "ms": round(1000 * seconds["ours"], 2),
        "llama_ms": round(1000 * seconds["llama"], 2),
        "times_llama": round(ratio, 4),
        **{key: round(value, 4) for key, value in added.items()},
        "times_expected": round(ratio / max(added.values()), 4),
        "is_within": ratio <= bound * max(1.0, *added.values()),
    }
    print(json.dumps(found), flush=True)
    return found


def main():
    """Measure, print and file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the result")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", help="families, by the names of the result")
    parser.add_argument("--hidden", type=int, help="another width, to try the benchmark out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.hidden:
        SIZES.update(hidden_size=args.hidden, intermediate_size=4 * args.hidden, vocab_size=512)
    every = configs(args.layers)
    llama = every.pop("plain llama")
    chosen = {name: config for name, config in every.items() if not args.only or name in args.only}
    rows = []
    of_llama = decoder_of(llama)
    for name, config in chosen.items():
        rows += decode_rows(name, config, llama, of_llama, args.rounds)
    del of_llama
    for name, config in chosen.items():
        torch.compiler.reset()
        of_llama = trainer_of(llama)
        seconds = least_seconds({"ours": trainer_of(config), "llama": of_llama}, args.rounds)
        rows.append(row("train", name, seconds, {"flops": train_flops(config) / train_flops(llama)}))
    over = [f"{each['what']} of {each['family']}" for each in rows if not each["is_within"]]
    print(f"{len(rows)} comparisons, over their bound: {', '.join(over) or 'none'}")
    if args.out:
        shape = {**SIZES, "layers": args.layers, "context": CONTEXT, "window": WINDOW}
        file_result(
            args.out, "families", {"shape": shape, "bounds": BOUNDS, "rows": rows}, packages=("torch",)
        )


if __name__ == "__main__":
    main()
