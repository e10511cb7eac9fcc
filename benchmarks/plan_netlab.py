"""How near is the planner to steps on emulated networks?

Predicts every row that `ethernet.py` measured and filed (`benchmarks/results/ethernet-DATE.json`) from its
recipe, the rate of its NICs and the compute of an unsharded replica, which is not in question. What a CPU
pays for each collective and each byte is that of the CPU in `DEVICES`.

    python benchmarks/plan_netlab.py [--rows benchmarks/results/ethernet-DATE.json] [--out benchmarks/results]
"""

import argparse
import json
from pathlib import Path

import numpy as np
from ethernet_cases import HOSTS, SETTINGS, Case, recipe_of
from planned import cluster_of, job_of
from results_file import file_result

from penstock.plan.predict import predict

RESULTS = Path(__file__).parent / "results"


def predicted(case, row, *, mbit_s, hidden):
    """Return the prediction of a row."""
    recipe = recipe_of(case, *SETTINGS[row["setting"]], hidden=hidden)
    job = job_of(recipe, world_size=HOSTS * case.processes)
    cluster = cluster_of(job, nodes=HOSTS, nics=case.nics, gbit_s=mbit_s / 1000, compute_s=row["compute_s"])
    return predict(job, cluster)


def compared(result):
    """Yield title, row and prediction of each row that counts."""
    for values in result["cases"]:
        case = Case(**{name: values[name] for name in Case.__dataclass_fields__ if name in values})
        for row in values["rows"]:
            if row["setting"] in SETTINGS and row["counts"]:
                found = predicted(case, row, mbit_s=values["mbit_s"], hidden=result["arguments"]["hidden"])
                yield case.title, row, found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    newest = max(RESULTS.glob("ethernet-20??-*.json"), default=None)
    parser.add_argument(
        "--rows", type=Path, default=newest, help="what ethernet.py filed; default: the newest"
    )
    parser.add_argument("--out", type=Path, help="folder for the result as JSON")
    options = parser.parse_args()
    if options.rows is None:
        parser.error("nothing is filed yet: run benchmarks/ethernet.py --out benchmarks/results")
    rows = []
    for title, row, found in compared(json.loads(options.rows.read_text())):
        error = found.step_s / row["step_s"] - 1
        sent = found.network_bytes / max(row["sent_bytes"]) - 1
        print(
            f"{title:55} {row['setting']:8} {row['step_s']:6.2f} s {found.step_s:6.2f} s {error:+6.1%}"
            f"  bytes {sent:+6.1%}"
        )
        rows.append({"case": title, "setting": row["setting"], "error": error, "bytes_error": sent})
    size = np.abs([row["error"] for row in rows])
    print(f"{len(rows)} rows, median {np.median(size):.1%}, worst {size.max():.1%}")
    if options.out:
        summary = {"of": options.rows.name, "median": float(np.median(size)), "worst": float(size.max())}
        file_result(options.out, "plan_netlab", {**summary, "rows": rows})


if __name__ == "__main__":
    main()
