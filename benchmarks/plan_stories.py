"""Can the planner tell what happened to others? IBM's T5 over Ethernet, and tokens a second of generation.

Three stories that no table of training speeds holds:

- T5-11B of IBM and PyTorch over 2 x 100 Gbit/s (pytorch.org/blog, December 2022): scaling efficiency, seconds
  a sample on one node over seconds a sample on N, from 20% without a limiter of gathers at batch 20, over 75%
  at batch 50 with one that blocks, to 90% with a sliding window. The allocator's stall is fitted to the first
  figure and TCP's losses to the last; 75%, the 64 nodes and the 3B model are not fitted. The 3B model's batch
  is not printed: it is taken to need as much memory as the 11B model's, by the planner's own estimate.
- T5-11B of the FSDP paper (arXiv:2304.11277, section 5.3): 7% less a device from 8 to 512 over 2 Tbit/s.
- gpt-fast's tokens a second at batch 1, three of thirteen fitted; and the 29 ms a token of IBM's 70B.

    python benchmarks/plan_stories.py
"""

import argparse
import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from results_file import file_result

from penstock.devices.figures import DEVICES
from penstock.models.decoder.config import DecoderConfig
from penstock.models.presets import expanded
from penstock.parallel.layout import RankLayout
from penstock.plan.decode import DecodeJob, predict_decode
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.predict import predict

DECODING = Path(__file__).parent / "data" / "decode_points.csv"
ONE_NODE = Cluster(nodes=1, devices_per_node=8, device=DEVICES["A100-80GB"])
VELA = replace(ONE_NODE, nics=2, nic_gbit_s=100, transport="tcp", latency_us=50)
META = replace(ONE_NODE, nics=1, nic_gbit_s=2000, transport="rdma", latency_us=10)


def t5(hidden, wide, heads):
    """Return 24 + 24 layers of T5 as a decoder: the width is such that all parameters are there."""
    return DecoderConfig(
        vocab_size=32_128,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=48,
        num_attention_heads=heads,
        head_dim=128,
        tie_word_embeddings=True,
    )


T5_11B, T5_3B = t5(1024, 54_524, 128), t5(1024, 12_222, 32)
BLOCKS, SLIDES, UNLIMITED = 1.0, 0.0, math.inf  # MiB of the window: one block, two blocks, no limit


def tokens_per_s(model, cluster, *, batch, window):
    """Return tokens a second and device of T5 with full recomputation, rows of 512 tokens."""
    job = TrainingStep(
        model=model,
        layout=RankLayout(shard=cluster.num_devices),
        sequence_length=512,
        micro_batch_size=batch,
        modes="full",
        reduce="bfloat16",
        kernels="eager",
        attention="plain",
        window_mib=window,
    )
    return predict(job, cluster).tokens_per_s_per_device


def scaling_efficiency(model, cluster, *, nodes, batch, window):
    """Return tokens a second and device on many nodes over those on one that nothing stalls."""
    alone = tokens_per_s(model, replace(cluster, nodes=1), batch=batch, window=SLIDES)
    return tokens_per_s(model, replace(cluster, nodes=nodes), batch=batch, window=window) / alone


def ibm():
    """Return (what, measured, predicted) of IBM's figures."""
    steps = (
        ("T5-11B, 32 nodes, batch 20, no limiter (fitted)", 0.20, T5_11B, 32, 20, UNLIMITED),
        ("T5-11B, 32 nodes, batch 50, blocking limiter", 0.75, T5_11B, 32, 50, BLOCKS),
        ("T5-11B, 32 nodes, batch 50, sliding window (fitted)", 0.90, T5_11B, 32, 50, SLIDES),
        ("T5-11B, 64 nodes, batch 50, sliding window", 0.80, T5_11B, 64, 50, SLIDES),
        ("T5-3B, 64 nodes, batch 170, sliding window", 0.95, T5_3B, 64, 170, SLIDES),
    )
    return [
        (what, measured, scaling_efficiency(model, VELA, nodes=nodes, batch=batch, window=window))
        for what, measured, model, nodes, batch, window in steps
    ]


def decoding():
    """Return (what, fitted, measured, predicted) tokens a second of every row of the table."""
    found = []
    with DECODING.open(newline="") as file:
        for row in csv.DictReader(file):
            job = DecodeJob(
                model=DecoderConfig(**expanded({"preset": row["model"]})),
                tensor=int(row["tensor"]),
                weight_bits=int(row["weight_bits"]),
                context_tokens=100,
                prompt_tokens=5,
            )
            what = f"{row['model']}, {row['tensor']} x {row['gpu']}, {row['weight_bits']} bits"
            speed = predict_decode(job, ONE_NODE).tokens_per_s
            found.append((what, row["fitted"] == "yes", float(row["tok_s"]), speed))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the result as JSON")
    options = parser.parse_args()
    print("scaling efficiency")
    for what, measured, found in ibm():
        print(f"  {what:54} {measured:.2f}  {found:.2f}  {100 * (found - measured):+.0f} points")
    kept = scaling_efficiency(T5_11B, META, nodes=64, batch=16, window=SLIDES)
    print(f"  {'T5-11B of the FSDP paper, 64 nodes, batch 16':54} 0.93  {kept:.2f}")
    print("tokens a second of one sequence")
    errors = []
    for what, fitted, measured, found in decoding():
        error = found / measured - 1
        errors += [] if fitted else [abs(error)]
        print(f"  {what:38} {measured:7.1f} {found:7.1f} {error:+6.1%} {'fitted' if fitted else ''}")
    print(f"  not fitted: median {np.median(errors):.1%}, worst {max(errors):.1%}")
    job = DecodeJob(model=DecoderConfig(**expanded({"preset": "llama2-70b"})), tensor=8)
    for what, of in (("graphs, one-shot", {}), ("neither", {"graphs": False, "one_shot": False})):
        found = predict_decode(replace(job, **of), ONE_NODE)
        parts = ("memory", "kernels", "collectives", "host")
        said = ", ".join(f"{part} {1e3 * getattr(found, part + '_s'):.1f}" for part in parts)
        print(f"70B on 8 A100, {what}: {1e3 * found.token_s:.1f} ms a token ({said})")
    if options.out:
        file_result(options.out, "plan_stories", {"scaling": ibm(), "decoding": decoding()})


if __name__ == "__main__":
    main()
