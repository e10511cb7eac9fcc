"""How near is the planner to published measurements?

Holds the shipped constants of `penstock.plan.constants` against every row that is a job of the planner,
family by family, with what was refused; `--fit` searches them anew on the handful of rows of FITTED_ROWS,
which no figure of the summary contains. Pure arithmetic: the machine it runs on does not matter.

    python benchmarks/plan_accuracy.py [--fit] [--rows OTHER.csv] [--out benchmarks/results]
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from plan_rows import ROWS, Refused, case_of, read_rows
from results_file import file_result

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
_BELIEFS, _STRENGTH = np.array([0.9, 0.7, 0.7, 1000.0, 0.5]), 0.05
"""What one would say without any measurement; it decides where the rows cannot tell two constants apart."""


def values_of(constants):
    """Return the values that are searched, in the order of _NAMES."""
    sustained = constants.sustained
    return np.array(
        [sustained["ampere"], sustained["hopper"], constants.memory, constants.fill, constants.contention]
    )


def with_values(values):
    """Return constants with other values."""
    ampere, hopper, memory, fill, contention = map(float, values)
    sustained = {**FITTED.sustained, "ampere": ampere, "hopper": hopper}
    return replace(FITTED, sustained=sustained, memory=memory, fill=fill, contention=contention)


def fit(cases, *, rounds=12):
    """Return the values of least squared log errors: Gauss-Newton, drawn lightly to the beliefs."""
    values, nudge = _BELIEFS.copy(), 1.001

    def errors(at):
        constants = with_values(at)
        rows = [np.log(predicted(case, constants) / case.measured) for case in cases]
        return np.array([*rows, *(_STRENGTH * np.log(at / _BELIEFS))])

    for _ in range(rounds):
        base = errors(values)
        others = (values * np.where(np.arange(len(values)) == i, nudge, 1) for i in range(len(values)))
        slopes = np.stack([(errors(other) - base) / np.log(nudge) for other in others], axis=1)
        step = -np.linalg.lstsq(slopes, base, rcond=None)[0]
        values = values * np.exp(np.clip(step, -0.2, 0.2))
    return values


def report(cases, constants=FITTED):
    """Print every row; return them, and the errors of those not fitted on, by family."""
    by_family, rows = defaultdict(list), []
    for case in cases:
        value = predicted(case, constants)
        error = value / case.measured - 1
        if case.id not in FITTED_ROWS:
            by_family[case.family].append(error)
        notes = "; ".join([*(["fitted on"] if case.id in FITTED_ROWS else []), *case.assumed])
        row = f"{case.id:>4} {case.family:15} {case.label:33} {case.metric:6}"
        print(f"{row} {case.measured:10.3f} {value:10.3f} {error:+7.1%}  {notes}")
        rows.append({"id": case.id, "family": case.family, "measured": case.measured, "predicted": value})
    return rows, by_family


def summary(errors):
    """Return median, 95th percentile and mean of relative errors."""
    size = np.abs(errors)
    return float(np.median(size)), float(np.quantile(size, 0.95)), float(np.mean(errors))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="search the constants anew")
    parser.add_argument("--rows", type=Path, default=ROWS, help="another table of the same columns")
    parser.add_argument("--out", type=Path, help="folder for the result as JSON")
    options = parser.parse_args()
    cases, refused = cases_of(options.rows)
    constants = FITTED
    if options.fit:
        values = fit([case for case in cases if case.id in FITTED_ROWS])
        print(dict(zip(_NAMES, values.round(3).tolist(), strict=True)))
        constants = with_values(values)
    rows, by_family = report(cases, constants)
    families = {family: summary(errors) for family, errors in by_family.items()}
    for family, (median, worst, mean) in families.items():
        rows_of = len(by_family[family])
        print(f"{family}: {rows_of} rows, median {median:.1%}, 95th {worst:.1%}, mean {mean:+.1%}")
    for row, reason in refused.items():
        print(f"{row}: refused: {reason}")
    if options.out:
        result = {"fitted_on": FITTED_ROWS, "families": families, "rows": rows, "refused": refused}
        file_result(options.out, "plan_accuracy", result)


if __name__ == "__main__":
    main()
