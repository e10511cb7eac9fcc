"""How many seconds does an elastic run need to train again after a node is killed, joins or leaves?

    python benchmarks/elastic.py --out benchmarks/results      # about three minutes on two cores

Plays one to three nodes on this machine (`penstock launch local --nodes 1:3`) and draws ten events from a
seed. Prints a row for each: seconds from the event to the next new step, and the steps that were trained
again. Then `penstock data audit` proves that every sample was trained on once, in order.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from results_file import SHARED, file_result

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the set-up of the tests

from tests.launched import disturb, write_recipe


def penstock(*words):
    """Run a command; return what it prints."""
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def measure(folder, *, seed, num_events):
    """Return a row for each event, and the audit."""
    corpus, run = folder / "corpus", folder / "run"
    source = Path(json.__file__).parent
    penstock("data", "prepare", source, "--train-tokenizer", 400, "--max-errors", 9, "--out", corpus)
    recipe = write_recipe(folder / "recipe.toml", corpus, run=run, steps=100_000, every=4)
    code, rows = disturb(
        recipe, run, seed=seed, num_events=num_events, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return {
        "seed": seed,
        "rows": rows,
        "code": code,
        "audit": json.loads(penstock("data", "audit", run, "--json")),
    }


def main():
    """Run the events; return 1 if a sample was lost or repeated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=10)
    parser.add_argument("--out", type=Path, help="folder to file the result in")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-elastic-") as folder:
        result = measure(Path(folder), seed=arguments.seed, num_events=arguments.events)
    for row in result["rows"]:
        print(f"{row['event']:<6} to {row['nodes']}  {row['seconds']:6.1f} s  {row['redone']} steps redone")
    audit = result["audit"]
    print(f"{audit['steps']} steps, {audit['samples']} samples, {len(audit['faults'])} faults")
    if arguments.out:
        file_result(arguments.out, "elastic", {"note": SHARED, **result}, packages=("torch",))
    return 1 if audit["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
