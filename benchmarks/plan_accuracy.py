"""How near is the planner to published measurements?

Holds the shipped constants of `penstock.plan.constants` against every row that is a job of the planner,
family by family, with what was refused; `--fit` searches them anew on the handful of rows of FITTED_ROWS,
which no figure of the summary contains. Pure arithmetic: the machine it runs on does not matter.

    python benchmarks/plan_accuracy.py [--fit] [--rows OTHER.csv]
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from plan_rows import ROWS, Refused, case_of, read_rows

from penstock.plan.constants import FITTED
from penstock.plan.predict import predict

FITTED_ROWS = ("6", "14", "7", "15", "20", "88", "94", "104")


def predicted(case, constants=FITTED):
    """Return what the model says in the unit of the measurement."""
    found = predict(case.job, case.cluster, constants)
    return {"tokens": found.tokens_per_s_per_device, "mfu": found.mfu, "hfu": found.hfu}[case.metric]


def cases_of(path=ROWS):
    """Return the rows that can be predicted, and why the others cannot."""
    cases, refused = [], {}
    for row in read_rows(path):
        try:
            cases.append(case_of(row))
        except Refused as reason:
            refused[row["id"]] = str(reason)
    return cases, refused


_NAMES = ("ampere", "hopper", "memory", "fill", "contention")


def with_values(values):
    """Return constants with the free ones replaced."""
    ampere, hopper, memory, fill, contention = values
    sustained = {**FITTED.sustained, "ampere": ampere, "hopper": hopper}
    return replace(FITTED, sustained=sustained, memory=memory, fill=fill, contention=contention)


def fit(cases, *, rounds=12):
    """Return the values of least squared log errors: Gauss-Newton, drawn lightly to where it started."""
    start = np.array(
        [
            FITTED.sustained["ampere"],
            FITTED.sustained["hopper"],
            FITTED.memory,
            FITTED.fill,
            FITTED.contention,
        ]
    )
    values = start.copy()

    def errors(at):
        constants = with_values(at)
        rows = [np.log(predicted(case, constants) / case.measured) for case in cases]
        return np.array([*rows, *(0.02 * np.log(at / start))])

    for _ in range(rounds):
        base = errors(values)
        slopes = np.stack(
            [
                (errors(values * np.where(np.arange(5) == i, 1.001, 1)) - base) / np.log(1.001)
                for i in range(5)
            ],
            axis=1,
        )
        values = values * np.exp(np.clip(-np.linalg.lstsq(slopes, base, rcond=None)[0], -0.2, 0.2))
    return values


def report(cases, constants=FITTED):
    """Print every row; return the errors of those not fitted on, by family."""
    by_family = defaultdict(list)
    for case in cases:
        value = predicted(case, constants)
        error = value / case.measured - 1
        if case.id not in FITTED_ROWS:
            by_family[case.family].append(error)
        notes = "; ".join([*(["fitted on"] if case.id in FITTED_ROWS else []), *case.assumed])
        row = f"{case.id:>4} {case.family:15} {case.label:33} {case.metric:6}"
        print(f"{row} {case.measured:10.3f} {value:10.3f} {error:+7.1%}  {notes}")
    return by_family


def summary(errors):
    """Return median, 95th percentile and mean of relative errors."""
    size = np.abs(errors)
    return float(np.median(size)), float(np.quantile(size, 0.95)), float(np.mean(errors))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="search the constants anew")
    parser.add_argument("--rows", type=Path, default=ROWS, help="another table of the same columns")
    options = parser.parse_args()
    cases, refused = cases_of(options.rows)
    constants = FITTED
    if options.fit:
        values = fit([case for case in cases if case.id in FITTED_ROWS])
        print(dict(zip(_NAMES, values.round(3).tolist(), strict=True)))
        constants = with_values(values)
    for family, errors in report(cases, constants).items():
        median, worst, mean = summary(errors)
        print(f"{family}: {len(errors)} rows, median {median:.1%}, 95th {worst:.1%}, mean {mean:+.1%}")
    for row, reason in refused.items():
        print(f"{row}: refused: {reason}")


if __name__ == "__main__":
    main()
