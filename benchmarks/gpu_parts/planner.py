"""How far the planner's predictions, filed before the run, are from what the parts before measured.

Reads training.json, tuning.json and serving.json beside its own file, and the newest
`results/gpu_predict-DATE.json`, which `benchmarks/gpu_predict.py` wrote. A row's value is the error,
|predicted / measured - 1| in percent, held against 15%; both figures stand beside it. Where nothing is filed
for the device, the prediction is made now, and the row says so.

On the null GPU and in tiny shapes the errors mean nothing, but for those of memory on the null GPU, whose
allocator is the real one.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

from gpu_parts.instruments import run_cases, set_up  # noqa: E402
from gpu_parts.part import NOT_COMPUTED, open_part  # noqa: E402
from gpu_parts.predictions import WITHIN, error_percent, predictions  # noqa: E402
from penstock.train.planning.auto import machines_of  # noqa: E402

RESULTS = Path(__file__).resolve().parents[1] / "results"
UNITS = ("tokens/s", "ms", "GiB")


def filed_before(device, folder=RESULTS):
    """Return the newest predictions filed for a device, by rows' names, and their date; none: {} and ""."""
    for path in sorted(folder.glob("gpu_predict-*.json"), reverse=True):
        found = json.loads(path.read_text())
        if device in found["rows"]:
            return {name: row["predicted"] for name, row in found["rows"][device].items()}, found["date"]
    return {}, ""


class Planner:
    """The rows of this part.

    Args:
        cluster: the device that was measured.
        folder: of filed predictions.
    """

    def __init__(self, part, cluster, folder=RESULTS):
        self.part = part
        self._predicted, self._filed = filed_before(cluster.device.name, folder)
        if not self._filed and cluster.device.architecture != "cpu":
            self._predicted = {name: value for name, (value, _) in predictions(cluster).items()}

    def rows(self):
        """Hold each measured row against its prediction; name those that have none."""
        measured = [
            row
            for part in ("training", "tuning", "serving")
            for row in self.part.rows_of(part)
            if row.status in ("measured", NOT_COMPUTED) and row.unit in UNITS and row.value is not None
        ]
        if not measured:
            self.part.skipped("plan", "no part before has figures: run training, tuning or serving first")
        without = []
        for row in measured:
            if row.name in self._predicted:
                self._hold(row, self._predicted[row.name])
            else:
                without.append(row.name)
        if without:
            self.part.skipped("plan, rows without a prediction", "; ".join(without))

    def _hold(self, row, predicted):
        error = error_percent(predicted, row.value)
        self.part.measured(
            f"plan {row.name}", abs(error), "% off",
            at_most=WITHIN, predicted=predicted, measured=row.value, unit_of_both=row.unit, signed=error,
            filed=self._filed or "not before the run",
        )  # fmt: skip
        print(
            f"  predicted {predicted:,.4g}, measured {row.value:,.4g} {row.unit} ({error:+.1f}%)", flush=True
        )


def main():
    part = open_part("planner", __doc__.partition("\n")[0])
    set_up(part.device)
    run_cases(part, {"plan": lambda: Planner(part, machines_of(world_size=1, compute="bfloat16")).rows()})


if __name__ == "__main__":
    main()
