"""What do islands that meet every so many steps cost in loss, and save in bytes?

    python benchmarks/outer.py --out benchmarks/results      # about ten minutes on two cores

The trainer itself, two islands of one gloo rank each, a Llama of 0.2 million parameters on rows of eight
Markov chains over 32 tokens. Settings take the same steps on the same samples from the same weights; a seed
keys weights and order. Loss is that of held-out rows after the last step, in which all islands meet, as mean
over seeds, with the standard deviation of plain data parallel over seeds as the noise. Bytes are computed, by
`bytes_per_step`. A toy says how settings compare, not what they cost a large model.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
from results_file import file_result
from shuffle_training import DOMAINS, LENGTH, VOCABULARY, make_chains, sample

from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.islands.schedule import bytes_per_step
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

PLAIN = "plain data parallel"
ISLANDS, ROWS = 2, 16


def settings(longest):
    """Return name -> [outer] section, for meetings at most so many steps apart."""
    found = {PLAIN: {}}
    for every in (each for each in (1, 8, 32) if each <= longest):
        for bits in (32, 8, 4):
            found[f"DiLoCo, every {every}, {bits} bits"] = {"every": every, "bits": bits}
        found[f"local SGD, every {every}"] = {"every": every, "rule": "average"}
    every = min(32, longest)
    streaming = {"every": every, "fragments": 2, "overlap": every // 8, "mixing": 0.5 if every >= 8 else 0.0}
    return {**found, f"streaming, every {every}, 4 bits": {**streaming, "bits": 4}}


def make_corpus(folder, num_tokens):
    """Write documents of the eight chains, mixed."""
    chains, width = make_chains(), 4 * LENGTH
    part = num_tokens // DOMAINS // width * width
    documents = [sample(chains[d], part, seed=d).reshape(-1, width) for d in range(DOMAINS)]
    mixed = np.random.default_rng(0).permutation(np.concatenate(documents))
    write_corpus(folder, mixed, vocab_size=VOCABULARY, documents_per_shard=1000)


def recipe_of(folder, name, outer, arguments, *, seed):
    """Return the recipe of one run."""
    return build_recipe(
        {
            "run": {"dir": str(folder / f"{name}-{seed}"), "steps": arguments.steps, "seed": seed},
            "model": {
                "hidden_size": arguments.hidden,
                "intermediate_size": 3 * arguments.hidden,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "vocab_size": VOCABULARY,
            },
            "data": {
                "corpora": {"chains": {"path": str(folder / "corpus")}},
                "sequence_length": LENGTH,
                "global_batch_size": ROWS,
                "holdout": 0.05,
            },
            "optim": {"learning_rate": 3e-3},
            "schedule": {"warmup_steps": min(20, arguments.steps // 4)},
            "validate": {"every": arguments.steps, "samples": 128},
            "checkpoint": {"every": arguments.steps},
            "parallel": {"replicate": ISLANDS, "shard": 1},
            "outer": outer,
            "compute": "float32",
        }
    )


def loss_of(recipe):
    """Train on two ranks; return the held-out loss."""
    records, _ = on_ranks(lambda world: records_of(open_state(recipe, world), recipe, world), ranks=ISLANDS)
    return next(record["validation_loss"] for record in records if "validation_loss" in record)


def measure(arguments, folder):
    """Return name -> losses by seed and bytes a step."""
    make_corpus(folder / "corpus", 2 * arguments.steps * ROWS * LENGTH + 200_000)
    found = {}
    for seed in range(arguments.seeds):
        for number, (name, outer) in enumerate(settings(arguments.steps).items()):
            recipe = recipe_of(folder, number, outer, arguments, seed=seed)
            size = bytes_per_step(recipe.outer, parameters=recipe.model.num_parameters, islands=ISLANDS)
            row = found.setdefault(name, {"bytes_per_step": size, "losses": []})
            row["losses"].append(loss_of(recipe))
            print(f"seed {seed}  {name:28} {row['losses'][-1]:.4f}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    plain = found[PLAIN]
    noise = statistics.stdev(plain["losses"]) if arguments.seeds > 1 else None
    print(f"\nafter {arguments.steps} steps; noise {noise}")
    for name, row in found.items():
        row["loss"] = statistics.mean(row["losses"])
        row["more_loss"] = row["loss"] - statistics.mean(plain["losses"])
        size = row["bytes_per_step"]
        print(f"{name:28} {row['loss']:8.4f} {row['more_loss']:+8.4f} {size:12,.0f} bytes a step")
    if arguments.out:
        asked = {"steps": arguments.steps, "seeds": arguments.seeds, "hidden": arguments.hidden}
        result = {"settings": {**asked, "islands": ISLANDS}, "noise": noise, "runs": found}
        file_result(arguments.out, "outer", result, packages=("torch",))


if __name__ == "__main__":
    main()
