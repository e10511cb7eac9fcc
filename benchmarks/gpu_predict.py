"""File what the planner says of the rows of the next GPU run, before it: tokens/s, ms and peak memory.

    python benchmarks/gpu_predict.py --out benchmarks/results

`make gpu` holds its rows against the newest of these files and prints both. Nothing here is measured.
"""

import argparse
from pathlib import Path

from gpu_parts.predictions import WITHIN, predictions
from results_file import file_result

from penstock.devices.figures import DEVICES
from penstock.plan.hardware import Cluster

NAME = "gpu_predict"
DEVICES_NEXT = ("H100-80GB", "H200")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", nargs="+", choices=DEVICES, metavar="NAME", default=DEVICES_NEXT,
        help=f"of the planner's data sheets (default: {' '.join(DEVICES_NEXT)})",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = {}
    for name in options.device:
        found = predictions(Cluster(devices_per_node=1, device=DEVICES[name]))
        rows[name] = {row: {"predicted": value, "unit": unit} for row, (value, unit) in found.items()}
    for row in rows[options.device[0]]:
        figures = ", ".join(f"{name} {of[row]['predicted']:,.4g}" for name, of in rows.items())
        print(f"{row}: {figures} {rows[options.device[0]][row]['unit']}")
    file_result(options.out, NAME, {"is_measured": False, "within_percent": WITHIN, "rows": rows})


if __name__ == "__main__":
    main()
