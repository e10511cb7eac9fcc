"""Differences between two results in lm-eval's format, with standard errors; no torch, and without lm-eval.

Where both have their samples, questions are paired: the standard error of the mean of their differences is
smaller than that of two independent means, because hard questions are hard for both (Miller, "Adding error
bars to evals", arXiv:2411.00640). Otherwise the standard errors are added as those of independent results.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import InputError

Results = Mapping[str, Any]  # Any: JSON values


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One metric of one task, in two results."""

    task: str
    metric: str
    """Name and filter, such as "acc,none"."""
    first: float
    second: float
    stderr: float | None
    """Standard error of `second - first`; None: unknown."""
    num_pairs: int
    """Questions that were paired; 0: the results are compared as independent ones."""

    @property
    def delta(self) -> float:
        """Score of the second minus that of the first."""
        return self.second - self.first


def read_results(path: Path) -> Results:
    """Read a file of results, written here or by lm-eval.

    Raises:
        InputError: it is not one.
    """
    remedy = "Give a file that `penstock eval --tasks ... --out FILE` or lm-eval wrote."
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as results ({error})", fix=remedy) from None
    if not isinstance(found, dict) or not isinstance(found.get("results"), dict):
        raise InputError(f"{path} has no results of an evaluation", fix=remedy)
    try:
        return {**found, "samples": found.get("samples") or _samples_beside(path)}
    except (OSError, ValueError) as error:
        raise InputError(f"The samples of {path} cannot be read ({error})", fix=remedy) from None


def _samples_beside(path: Path) -> dict[str, list[Any]]:
    """Read the samples that lm-eval writes beside its results: samples_TASK_DATE.jsonl."""
    _, found, date = path.stem.partition("results_")
    each = sorted(path.parent.glob(f"samples_*_{date}.jsonl")) if found else []
    samples = {}
    for one in each:
        with one.open(encoding="utf-8", newline="\n") as lines:  # questions may have other ends of lines
            samples[one.stem.removeprefix("samples_").removesuffix(f"_{date}")] = [*map(json.loads, lines)]
    return samples


def differences(first: Results, second: Results) -> list[Difference]:
    """Return the differences of all numbers that both results have, in the order of the first.

    Raises:
        InputError: they have no task in common.
    """
    found = [
        _difference(task, metric, first, second)
        for task, metrics in first["results"].items()
        for metric in metrics
        if _is_metric(metric)
        and _number(metrics[metric])
        and _number(second["results"].get(task, {}).get(metric))
    ]
    if not found:
        names = ", ".join(second["results"]) or "none"
        raise InputError(
            "The two results have no task in common",
            got=", ".join(first["results"]) or "none",
            fix=f"The second has {names}.",
        )
    return found


def cautions(first: Results, second: Results) -> Iterator[str]:
    """Yield what makes two results hard to compare: other shots, versions, templates or questions."""
    for task in first["results"].keys() & second["results"].keys():
        for key, what in (("n-shot", "examples"), ("versions", "the task's version")):
            one, other = (results.get(key, {}).get(task) for results in (first, second))
            if one != other:
                yield f"{task}: {what} differ: {one} and {other}"
        one, other = (results.get("task_hashes", {}).get(task) for results in (first, second))
        if one and other and one != other:
            yield f"{task}: the questions or prompts differ"
    if first.get("chat_template_sha") != second.get("chat_template_sha"):
        yield "the chat templates differ"


def _difference(task: str, metric: str, first: Results, second: Results) -> Difference:
    one, other = float(first["results"][task][metric]), float(second["results"][task][metric])
    pairs = list(_pairs(task, metric, first, second))
    stderr, num_pairs = _unpaired(task, metric, first, second), 0
    if len(pairs) > 1 and _is_mean(pairs, one, other):
        stderr, num_pairs = _stderr([b - a for a, b in pairs]), len(pairs)
    return Difference(task=task, metric=metric, first=one, second=other, stderr=stderr, num_pairs=num_pairs)


def _pairs(task: str, metric: str, first: Results, second: Results) -> Iterator[tuple[float, float]]:
    name, _, chosen = metric.partition(",")
    each = [
        {
            (one.get("doc_id"), one.get("doc_hash")): one[name]
            for one in results["samples"].get(task, ())
            if one.get("filter", "none") == chosen and _number(one.get(name))
        }
        for results in (first, second)
    ]
    if each[0].keys() == each[1].keys():
        for key, value in each[0].items():
            yield float(value), float(each[1][key])


def _is_mean(pairs: list[tuple[float, float]], first: float, second: float) -> bool:
    """Return True if the metric is the mean of its samples, as accuracies are and perplexities are not."""
    means = [sum(side) / len(pairs) for side in zip(*pairs, strict=True)]
    return all(
        math.isclose(mean, told, rel_tol=1e-6, abs_tol=1e-9)
        for mean, told in zip(means, (first, second), strict=True)
    )


def _unpaired(task: str, metric: str, first: Results, second: Results) -> float | None:
    name, _, chosen = metric.partition(",")
    each = [results["results"][task].get(f"{name}_stderr,{chosen}") for results in (first, second)]
    return math.hypot(*each) if all(map(_number, each)) else None


def _stderr(values: list[float]) -> float:
    """Return the standard error of a mean.

    >>> _stderr([0.0, 1.0, 0.0, 1.0])
    0.28867513459481287
    """
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _is_metric(name: str) -> bool:
    """Return True for "acc,none", False for its standard error and for what is no metric."""
    return "," in name and not name.partition(",")[0].endswith("_stderr")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
