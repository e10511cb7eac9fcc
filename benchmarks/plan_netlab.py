"""How near is the planner to steps on emulated networks?

Reads what `ethernet.py` measured (`benchmarks/results/ethernet-DATE.json`) and predicts every row of it from
its recipe, the rate of its NICs and the compute of an unsharded replica, which is not in question.
What a CPU pays for each collective and each byte is that of the CPU in `DEVICES`.

    python benchmarks/plan_netlab.py [--rows benchmarks/results/ethernet-DATE.json] [--out benchmarks/results]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from results_file import file_result

from penstock.models.llama.config import LlamaConfig
from penstock.parallel.layout import Layout
from penstock.plan.hardware import DEVICES, Cluster
from penstock.plan.job import Job
from penstock.plan.predict import predict, timeline_of

RESULTS = Path(__file__).parent / "results"
LEVERS = {
    "naive": {"overlapped": False},
    "keep": {"overlapped": False, "keep_mib": float("inf")},
    "overlap": {},
    "exact": {"keep_mib": float("inf")},
    "hybrid": {"keep_mib": float("inf")},
    "8 bits": {"keep_mib": float("inf"), "gather": "int8", "reduce": "int8"},
}


def job_of(setting, case, *, hidden):
    """Return a row of `ethernet.py` as a job."""
    ranks = 2 * case["processes"]
    model = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=max(1, hidden // 32),
    )
    hybrid = setting == "hybrid"
    return Job(
        model=model,
        layout=Layout(replicate=2, shard=ranks // 2) if hybrid else Layout(shard=ranks),
        sequence_length=16 if case["is_paced"] else 128,
        num_micro_batches=case["micro_batches"],
        compute="float32",
        kernels="eager",
        **LEVERS[setting],
    )


def cluster_of(case, job, *, compute_s):
    """Return the emulated hosts; their devices compute as fast as the unsharded replicas did."""
    plain = replace(DEVICES["CPU"], memory_gb_s=1e6, launch_us=0.0, float32_tflops=1.0)
    hosts = Cluster(
        nodes=2,
        devices_per_node=case["processes"],
        device=plain,
        nics=case["nics"],
        nic_gbit_s=case["mbit_s"] / 1000,
        latency_us=100,
        straggling=0.0,
    )
    at_one_tflops = timeline_of(replace(job, overlapped=False), hosts).compute_s
    return replace(hosts, device=replace(plain, float32_tflops=at_one_tflops / compute_s))


def rows_of(result):
    """Yield case, setting, measured and predicted seconds of each row."""
    for case in result["cases"]:
        for row in case["rows"]:
            if row["setting"] in LEVERS and row["counts"]:
                job = job_of(row["setting"], case, hidden=result["arguments"]["hidden"])
                cluster = cluster_of(case, job, compute_s=row["compute_s"])
                yield case, row, predict(job, cluster)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    newest = max(RESULTS.glob("ethernet-*.json"), default=None)
    parser.add_argument(
        "--rows", type=Path, default=newest, help="what ethernet.py filed; default: the newest"
    )
    parser.add_argument("--out", type=Path, help="folder for the result as JSON")
    options = parser.parse_args()
    if options.rows is None:
        parser.error("nothing is filed yet: run benchmarks/ethernet.py --out benchmarks/results")
    found, errors = [], {True: [], False: []}
    for case, row, predicted in rows_of(json.loads(options.rows.read_text())):
        error = predicted.step_s / row["step_s"] - 1
        errors[case["is_paced"]].append(abs(error))
        compute = "paced" if case["is_paced"] else "real"
        shape = f"{case['micro_batches']} parts, 2 x {case['processes']}"
        what = f"{case['rate']} x {case['nics']}, {compute}, {shape}"
        sent = predicted.network_bytes / max(row["sent_bytes"]) - 1
        print(
            f"{what:38} {row['setting']:8} {row['step_s']:6.2f} s {predicted.step_s:6.2f} s {error:+6.1%}"
            f"  bytes {sent:+6.1%}"
        )
        found.append(
            {
                "case": what,
                "setting": row["setting"],
                "measured": row["step_s"],
                "predicted": predicted.step_s,
            }
        )
    summary = {
        name: {"rows": len(of), "median": float(np.median(of)), "worst": max(of)}
        for name, of in (
            ("paced", errors[True]),
            ("real", errors[False]),
            ("all", errors[True] + errors[False]),
        )
        if of
    }
    for name, of in summary.items():
        print(f"{name}: {of['rows']} rows, median {of['median']:.1%}, worst {of['worst']:.1%}")
    if options.out:
        file_result(options.out, "plan_netlab", {"of": options.rows.name, "summary": summary, "rows": found})


if __name__ == "__main__":
    main()
