"""How near is the planner to published measurements?

Holds the shipped constants of `penstock.plan.compute` against every row that is a job of the planner,
family by family, with what was refused. `--fit` searches them again. `--held-out` is the honest figure: each
source (one paper, one page of results) is predicted with constants fitted to all the others. Pure arithmetic:
the machine it runs on does not matter; `--held-out` takes three minutes.

    python benchmarks/plan_accuracy.py [--fit] [--held-out] [--rows OTHER.csv] [--out benchmarks/results]
"""

import argparse
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from plan_rows import ROWS, Refused, case_of, read_rows
from results_file import file_result

from penstock.plan.compute import FITTED
from penstock.plan.memory import peak
from penstock.plan.predict import predict

NOT_FITTED = ("long rows",)
"""Too few rows, of one source, and far off: a constant that met them would mean nothing."""

_NAMES = ("ampere", "hopper", "memory", "fill", "contention", "hidden", "retry_s")
_BELIEFS, _STRENGTH = np.array([0.9, 0.75, 0.7, 1000.0, 0.5, 0.5, 0.01]), 0.05
"""What one would say without any measurement; it decides where the rows cannot tell two constants apart."""
_SMALL_ERROR = 0.03
"""Errors beyond this count by their size, not its square: an odd row does not bend the fit."""


def predicted(case, constants=FITTED):
    """Return what the model says in the unit of the measurement."""
    memory = peak(
        case.job
    ).total  # what ran did fit: an estimate beyond the device's memory is wrong, not tight
    memory = memory if memory <= case.cluster.device.memory_gib * 2**30 else 0
    found = predict(case.job, case.cluster, constants, memory_bytes=memory)
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


def values_of(constants):
    """Return the values that are searched, in the order of _NAMES."""
    sustained = [constants.sustained[name] for name in _NAMES[:2]]
    return np.array([*sustained, *(getattr(constants, name) for name in _NAMES[2:])])


def with_values(values):
    """Return constants with other values; Blackwell, of which there are two rows, is taken for Hopper."""
    ampere, hopper, *others = map(float, values)
    sustained = {**FITTED.sustained, "ampere": ampere, "hopper": hopper, "blackwell": hopper}
    return replace(FITTED, sustained=sustained, **dict(zip(_NAMES[2:], others, strict=True)))


class Fit:
    """Least squares of log errors around some values, every source with the square root of its rows as
    weight."""

    def __init__(self, cases, values):
        self.cases = [case for case in cases if case.family not in NOT_FITTED]
        self.values, nudge = values, 1.001
        self.errors = self._errors(values)
        others = (values * np.where(np.arange(len(values)) == i, nudge, 1) for i in range(len(values)))
        self.slopes = np.stack(
            [(self._errors(other) - self.errors) / np.log(nudge) for other in others], axis=1
        )

    def _errors(self, values):
        constants = with_values(values)
        return np.array([np.log(predicted(case, constants) / case.measured) for case in self.cases])

    def step(self, without=None):
        """Return the values after one Gauss-Newton step, a source left out or not."""
        rows = np.array([case.source != without for case in self.cases])
        of_source = Counter(case.source for case in self.cases)
        weights = np.array([of_source[case.source] ** -0.25 for case in self.cases])
        weights *= np.sqrt(_SMALL_ERROR / np.maximum(np.abs(self.errors), _SMALL_ERROR)) * rows
        slopes = np.concatenate([self.slopes * weights[:, None], _STRENGTH * np.eye(len(self.values))])
        errors = np.concatenate([self.errors * weights, _STRENGTH * np.log(self.values / _BELIEFS)])
        step = -np.linalg.lstsq(slopes, errors, rcond=None)[0]
        return self.values * np.exp(np.clip(step, -0.2, 0.2))


def fit(cases, *, start=_BELIEFS, rounds=10):
    """Return the values of least error."""
    values = start
    for _ in range(rounds):
        values = Fit(cases, values).step()
    return values


def held_out(cases):
    """Yield each case with its error under constants that were fitted to the other sources."""
    for source in sorted({case.source for case in cases}):
        values = fit([case for case in cases if case.source != source])
        constants = with_values(values)
        for case in cases:
            if case.source == source:
                yield case, predicted(case, constants) / case.measured - 1


def report(cases, constants=FITTED):
    """Print every row; return them, and the errors by family."""
    by_family, rows = defaultdict(list), []
    for case in cases:
        value = predicted(case, constants)
        error = value / case.measured - 1
        by_family[case.family].append(error)
        row = f"{case.id:>4} {case.family:15} {case.label:33} {case.metric:6}"
        print(f"{row} {case.measured:10.3f} {value:10.3f} {error:+7.1%}  {'; '.join(case.assumed)}")
        rows.append({"id": case.id, "family": case.family, "measured": case.measured, "predicted": value})
    return rows, by_family


def summary(errors):
    """Return median, 95th percentile and mean of relative errors."""
    size = np.abs(errors)
    return float(np.median(size)), float(np.quantile(size, 0.95)), float(np.mean(errors))


def print_families(by_family):
    """Print and return the summary of each family."""
    families = {family: summary(errors) for family, errors in by_family.items()}
    for family, (median, worst, mean) in families.items():
        rows_of = len(by_family[family])
        print(f"{family}: {rows_of} rows, median {median:.1%}, 95th {worst:.1%}, mean {mean:+.1%}")
    return families


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="search the constants again")
    parser.add_argument("--held-out", action="store_true", help="leave out each source in turn")
    parser.add_argument("--rows", type=Path, default=ROWS, help="another table of the same columns")
    parser.add_argument("--out", type=Path, help="folder for the result as JSON")
    options = parser.parse_args()
    cases, refused = cases_of(options.rows)
    constants = FITTED
    if options.fit:
        values = fit(cases)
        print(dict(zip(_NAMES, values.round(4).tolist(), strict=True)))
        constants = with_values(values)
    rows, by_family = report(cases, constants)
    result = {"families": print_families(by_family), "rows": rows, "refused": refused}
    for row, reason in refused.items():
        print(f"{row}: refused: {reason}")
    if options.held_out:
        print("each source predicted from the others:")
        without = defaultdict(list)
        for case, error in held_out(cases):
            without[case.family].append(error)
        result["held_out"] = print_families(without)
    if options.out:
        file_result(options.out, "plan_accuracy", result)


if __name__ == "__main__":
    main()
