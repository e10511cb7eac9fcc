"""What `penstock plan` says of each figure of the parts before, and by how much it is wrong.

Reads training.json and serving.json beside its own file. A row's value is the error, |predicted / measured -
1| in percent, held against the half-width of the planner's own band where the prediction has one. Training is
predicted from the recipe (`plan.predict`), memory as `--dry-run` does, serving by `plan.decode`: a step of
decoding for each number of answers that are not done, after the forward pass of all prompts.

On a CPU in tiny shapes the errors mean nothing.
"""

import sys
import tempfile
from functools import partial
from itertools import groupby
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

from gpu_parts.instruments import attempt, run_cases, set_up  # noqa: E402
from gpu_parts.part import NOT_COMPUTED, open_part  # noqa: E402
from gpu_parts.serving import EAGER, shape_of  # noqa: E402
from gpu_parts.training import SHAPES, TINY, recipe_of  # noqa: E402
from penstock.parallel.layout import RankLayout  # noqa: E402
from penstock.plan.decode import DecodeJob, predict_decode  # noqa: E402
from penstock.plan.predict import predict  # noqa: E402
from penstock.train.planning.auto import machines_of  # noqa: E402
from penstock.train.planning.memory import job_of, memory_plan  # noqa: E402

WEIGHT_BITS = {"bfloat16": 16, "int8": 8, "float8": 8}


def error_percent(predicted, measured):
    """Return how far a prediction is off, in percent of what was measured; above 0: too much.

    >>> round(error_percent(110.0, 100.0), 6)
    10.0
    """
    return 100 * (predicted / measured - 1)


def decode_segments(answers):
    """Return (answers in the making, steps) from the first step after the prompts to the last.

    An answer's first token comes with its prompt, so n tokens take n - 1 steps more.

    >>> decode_segments([4, 2, 4])
    [(3, 1), (2, 2)]
    """
    steps, found, done = sorted(answer - 1 for answer in answers), [], 0
    left = len(steps)
    for until, group in groupby(steps):
        if until > done:
            found.append((left, until - done))
        left, done = left - len(list(group)), until
    return found


def training_prediction(job, cluster, folder):
    """Return (tokens/s, half-width of the band) of a row of training.json."""
    model = TINY if job["is_tiny"] else SHAPES[job["shape"]]
    recipe = recipe_of(
        folder, {**model, "num_hidden_layers": job["layers"]},
        rows=job["rows"], length=job["length"], compiled=job["compiled"], linear=job["linear"],
    )  # fmt: skip
    memory = memory_plan(recipe, RankLayout()).total
    found = predict(job_of(recipe, RankLayout()), cluster, memory_bytes=memory)
    return found.tokens_per_s_per_device, found.band


def serving_prediction(job, cluster):
    """Return (seconds of prompts, seconds of decoding, half-width of the band) of a row of serving.json."""
    model = shape_of(job["shape"], is_tiny=job["is_tiny"])
    prompts, answers = job["prompts"], job["answers"]

    def step(batch):
        return predict_decode(
            DecodeJob(
                model=model,
                batch=batch,
                context_tokens=round((sum(prompts) + sum(answers) / 2) / len(prompts)),
                prompt_tokens=round(sum(prompts) / len(prompts)),
                weight_bits=WEIGHT_BITS[job["weights"]],
                graphs=job["mode"] != EAGER,
            ),
            cluster,
        )

    prompts_s = step(len(prompts)).prefill_s
    decode_s = sum(steps * step(batch).token_s for batch, steps in decode_segments(answers))
    return prompts_s, decode_s, step(1).band


class Planner:
    """The rows of this part."""

    def __init__(self, part, folder):
        self.part, self.folder = part, folder
        self.cluster = machines_of(world_size=1, compute="bfloat16")

    def rows_of(self, name):
        """Return what a part measured; none, and a row that says so, if it was not run."""
        rows = [row for row in self.part.rows_of(name) if row.status in ("measured", NOT_COMPUTED)]
        rows = [row for row in rows if row.value is not None]
        if not rows:
            self.part.skipped(f"plan {name}", f"{name}.json has no figures: run that part first")
        return rows

    def file(self, row, predicted, band=None):
        """File the error of one prediction."""
        error = error_percent(predicted, row.value)
        self.part.measured(
            f"plan {row.name}", abs(error), "% off",
            at_most=None if band is None else 100 * band,
            predicted=predicted, measured=row.value, unit_of_both=row.unit, signed=error,
            means_nothing=self.part.is_tiny,
        )  # fmt: skip

    def training(self):
        """Tokens a second and memory of each setting."""
        for row in self.rows_of("training"):
            if (job := row.more.get("job")) is not None:
                attempt(self.part, f"plan {row.name}", partial(self._training, row, job), is_optional=True)
            elif "predicted_gib" in row.more:
                self.file(row, row.more["predicted_gib"])

    def _training(self, row, job):
        self.file(row, *training_prediction(job, self.cluster, self.folder))

    def serving(self):
        """A stream alone, prompts and many requests."""
        for row in self.rows_of("serving"):
            if (job := row.more.get("job")) is not None:
                attempt(self.part, f"plan {row.name}", partial(self._serving, row, job))

    def _serving(self, row, job):
        prompts_s, decode_s, band = serving_prediction(job, self.cluster)
        if row.unit == "ms":
            self.file(row, 1e3 * decode_s / (job["answers"][0] - 1), band)
        elif max(job["answers"]) == 1:
            self.file(row, sum(job["prompts"]) / prompts_s, band)
        else:
            self.file(row, sum(job["answers"]) / (prompts_s + decode_s), band)


def main():
    part = open_part("planner", __doc__.partition("\n")[0])
    set_up(part.device)
    with tempfile.TemporaryDirectory() as folder:

        def plan():
            found = Planner(part, Path(folder))
            found.training()
            found.serving()

        run_cases(part, {"plan": plan})


if __name__ == "__main__":
    main()
