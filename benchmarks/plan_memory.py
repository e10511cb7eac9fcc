"""How near the planned memory of a step is to what a step takes: real ranks on this machine, many recipes.

    python benchmarks/plan_memory.py
    python benchmarks/plan_memory.py --only "shard 4" "tensor 2" --out /tmp/results

Measured are the bytes of the tensors that are alive, on the rank that has most.
"""

import argparse
import random
import tempfile
from pathlib import Path

from results_file import file_result

from penstock.parallel.layout import layout_of
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.step_memory import peak_of_step
from penstock.train.planning.memory import memory_plan
from penstock.train.resolve.load import build_recipe

MIB = 2**20
MODEL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DATA = {"sequence_length": 64, "global_batch_size": 8, "micro_batch_size": 2}
LONG = {"sequence_length": 512}


def case(ranks=1, *, model=None, data=None, compute="float32", **sections):
    """Return the ranks and the sections of one recipe."""
    return ranks, {
        "model": {**MODEL, **(model or {})},
        "data": {**DATA, **(data or {})},
        "compute": compute,
        **sections,
    }


CASES = {
    "alone": case(),
    "alone, one micro-batch": case(data={"micro_batch_size": 8}),
    "alone, tied": case(model={"tie_word_embeddings": True}),
    "alone, bfloat16": case(compute="bfloat16"),
    "alone, long rows": case(data=LONG),
    "recompute full": case(data={"micro_batch_size": 8}, recompute={"policy": "full"}),
    "recompute operators": case(data={"micro_batch_size": 8}, recompute={"policy": "operators"}),
    "recompute every second": case(data={"micro_batch_size": 8}, recompute={"policy": "every"}),
    "shard 2": case(2),
    "shard 4": case(4),
    "shard 4, 12 blocks": case(4, model={"num_hidden_layers": 12}),
    "shard 4, 12 blocks, recompute full": case(
        4, model={"num_hidden_layers": 12}, recompute={"policy": "full"}
    ),
    "shard 4, kept after forward": case(4, parallel={"reshard_after_forward": False}),
    "shard 2, bfloat16": case(2, compute="bfloat16"),
    "shard 2, bfloat16 weights, a copy": case(
        2, compute="bfloat16", precision={"weights": "bfloat16_master"}
    ),
    "shard 2, bfloat16 weights, rounded": case(
        2, compute="bfloat16", precision={"weights": "bfloat16_stochastic"}
    ),
    "shard 2, long rows, recompute full": case(2, data=LONG, recompute={"policy": "full"}),
    "shard 2, a large vocabulary": case(2, model={"vocab_size": 16_384}, data={"micro_batch_size": 4}),
    "shard 2, norms of queries and keys": case(
        2, model={"model_type": "qwen3", "head_dim": 32}, data={"micro_batch_size": 4}
    ),
    "shard 2, muon": case(2, optim={"rule": "muon"}),
    "shard 2, 8-bit moments": case(2, optim={"rule": "adamw_8bit"}),
    "shard 2, stock": case(2, ethernet={"overlap": False}),
    "shard 2, everything kept": case(2, ethernet={"keep_mib": float("inf")}),
    "alone, breadth first": case(ethernet={"schedule": "breadth_first"}),
    "shard 2, breadth first": case(2, ethernet={"schedule": "breadth_first"}),
    "shard 2, breadth first, everything kept": case(
        2, data=LONG, ethernet={"schedule": "breadth_first", "keep_mib": float("inf")}
    ),
    "shard 2, breadth first, long rows, recompute full": case(
        2, data=LONG, recompute={"policy": "full"}, ethernet={"schedule": "breadth_first"}
    ),
    "shard 2, breadth first, bfloat16": case(2, compute="bfloat16", ethernet={"schedule": "breadth_first"}),
    "shard 2 x replicate 2": case(4, parallel={"shard": 2, "replicate": 2}),
    "replicate 2": case(2, parallel={"shard": 1, "replicate": 2}),
    "tensor 2": case(2, parallel={"tensor": 2}),
    "tensor 2, long rows": case(2, data=LONG, parallel={"tensor": 2}),
    "tensor 2 x shard 2": case(4, parallel={"tensor": 2}),
    "context 2": case(2, parallel={"context": 2}),
    "context 2, long rows": case(2, data=LONG, parallel={"context": 2}),
    "context 2, ulysses": case(2, parallel={"context": 2, "context_rule": "ulysses"}),
    "pipeline 2": case(2, parallel={"pipeline": 2}),
    "pipeline 2, two stages a rank": case(2, parallel={"pipeline": 2, "stages_per_rank": 2}),
    "pipeline 2, long rows": case(2, data={**LONG, "global_batch_size": 16}, parallel={"pipeline": 2}),
    "pipeline 2 x shard 2": case(4, parallel={"pipeline": 2}),
}


def measure(ranks, sections):
    """Return the planned and the measured peak of a recipe, in MiB, and when and of what the plan is."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = sections["model"]["vocab_size"]
        random_numbers = random.Random(0)
        documents = [
            [random_numbers.randrange(1, vocabulary) for _ in range(random_numbers.randrange(20, 200))]
            for _ in range(400)
        ]
        corpus = write_corpus(Path(folder) / "corpus", documents, vocab_size=vocabulary)
        data = {**sections["data"], "corpora": {"docs": {"path": str(corpus)}}}
        config = build_recipe({**sections, "run": {"dir": f"{folder}/run", "steps": 5}, "data": data})
        measured = max(on_ranks(lambda world: peak_of_step(config, world), ranks=ranks))
    plan = memory_plan(config, layout_of(config.parallel, world_size=ranks), on_cpu=True)
    parts = {name: round(size / MIB, 2) for name, size in plan.parts.items()}
    return {
        "planned_mib": round(plan.total / MIB, 2),
        "measured_mib": round(measured / MIB, 2),
        "ratio": round(plan.total / measured, 3),
        "moment": plan.moment,
        "parts_mib": parts,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    rows = {}
    for name in arguments.only:
        rows[name] = measure(*CASES[name])
        row = rows[name]
        print(
            f"{name:<38} planned {row['planned_mib']:7.2f} measured {row['measured_mib']:7.2f} MiB "
            f"{row['ratio']:.3f}"
        )
    off = sorted(abs(row["ratio"] - 1) for row in rows.values())
    summary = {"cases": len(off), "median": round(off[len(off) // 2], 4), "worst": round(off[-1], 4)}
    print(f"off by {summary['median']:.1%} in the median, {summary['worst']:.1%} at worst, of {len(off)}")
    file_result(arguments.out, "plan_memory", {"summary": summary, "cases": rows}, packages=["torch"])


if __name__ == "__main__":
    main()
