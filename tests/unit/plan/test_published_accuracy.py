"""The planner stays as near to published measurements as docs/explanation/planner.md says."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture(scope="module")
def benchmark(request):
    """The benchmark's modules, which import one another as scripts do."""
    names = ("plan_rows", "plan_accuracy", "plan_stories")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(request.config.rootpath / "benchmarks"))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def shipped(benchmark):
    """The fit around the shipped constants."""
    accuracy = benchmark.plan_accuracy
    return accuracy.Fit(accuracy.cases_of()[0], accuracy.values_of(accuracy.FITTED))


@pytest.fixture(scope="module")
def held_out(benchmark, shipped):
    """Return errors by family, each source predicted with constants fitted to the others.

    One Gauss-Newton step from the shipped constants stands for the whole search of `--held-out`, which takes
    minutes.
    """
    accuracy = benchmark.plan_accuracy
    cases, found = accuracy.cases_of()[0], {}
    for source in {case.source for case in cases}:
        constants = accuracy.with_values(shipped.step(without=source))
        for case in cases:
            if case.source == source:
                error = accuracy.predicted(case, constants) / case.measured - 1
                found.setdefault(case.family, []).append(abs(error))
    return found


@pytest.mark.parametrize(
    ("family", "rows", "median", "band"),
    [
        ("dense", 50, 0.05, 0.15),
        ("float8", 10, 0.05, 0.21),
        ("tensor parallel", 15, 0.08, 0.35),
        ("pipeline", 35, 0.12, 0.35),
        ("long rows", 5, 0.15, 0.50),
    ],
)
def test_a_source_that_was_left_out_of_the_fit_is_predicted(held_out, family, rows, median, band):
    assert len(held_out[family]) >= rows
    assert np.median(held_out[family]) < median
    assert np.quantile(held_out[family], 0.95) < band


def test_the_shipped_constants_are_those_of_the_fit(benchmark, shipped):
    accuracy, values = benchmark.plan_accuracy, shipped.values
    assert shipped.step() == pytest.approx(values, rel=0.05)
    led = accuracy.fit(accuracy.cases_of()[0], start=1.2 * values, rounds=1)
    assert (led < 1.15 * values).all(), "steps lead back"


def row_of(benchmark, **changes):
    """Return a published row with other values in some columns, as a case."""
    row = next(row for row in benchmark.plan_rows.read_rows() if row["id"] == "207")
    return benchmark.plan_rows.case_of({**row, **changes}).job


def test_a_row_says_what_is_computed_again_and_how_many_stages_a_rank_has(benchmark):
    assert row_of(benchmark, activation_ckpt="none at 8K").modes == "keep"
    assert row_of(benchmark, activation_ckpt="full").modes == "full"
    assert row_of(benchmark).stages_per_rank == 1
    assert row_of(benchmark, parallelism="FSDP8 TP8 PP8 VP2 Interleaved 1F1B").stages_per_rank == 2
    row = next(row for row in benchmark.plan_rows.read_rows() if row["gpu"].startswith("B200"))
    assert benchmark.plan_rows.case_of(row).cluster.device.name == "B200"


def test_ibms_figures_over_tcp_are_within_3_points(benchmark):
    for what, measured, found in benchmark.plan_stories.ibm():
        assert found == pytest.approx(measured, abs=0.03), what


def test_generation_at_batch_1_is_within_20_percent_of_gpt_fast(benchmark):
    rows = benchmark.plan_stories.decoding()
    found = [abs(predicted / measured - 1) for _, fitted, measured, predicted in rows if not fitted]
    assert np.median(found) < 0.05
    assert max(found) < 0.20


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallelism": "LoRA"}, "LoRA and offloading"),
        ({"gpu": "V100"}, "no figures of V100"),
        ({"hidden": ""}, "shape is not known"),
        ({"tok_s_gpu": "", "mfu_pct": "", "hfu_pct": ""}, "no speed"),
    ],
)
def test_a_row_that_is_no_job_is_refused_with_the_reason(benchmark, change, said):
    row = next(row for row in benchmark.plan_rows.read_rows() if row["id"] == "16")
    with pytest.raises(benchmark.plan_rows.Refused, match=said):
        benchmark.plan_rows.case_of({**row, **change})
