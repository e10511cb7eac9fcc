import ast
import json
from pathlib import Path

import pytest
from tools.unproven import (
    NEVER,
    Feature,
    features_of,
    figure_of,
    last_run,
    lines_of,
    never_section,
    ran_section,
    results_in,
)

ROOT = Path(__file__).parents[3]
FEATURES = features_of((ROOT / "benchmarks" / "data" / "unproven.toml").read_text())

FEATURE = Feature(
    what="Waves",
    hardware="a sea",
    files=("a.py",),
    proof=("equalities: wave: height*", "equalities: wave: length*"),
    figure="kernels: wave, *: ours",
)


def row(name, status, value=None, unit=""):
    return {"name": name, "status": status, "value": value, "unit": unit}


def filed(folder, date, *, is_gpu=True, size="full", equalities=(), kernels=()):
    """Write what the kit writes."""
    parts = {"equalities": {"rows": list(equalities)}, "kernels": {"rows": list(kernels)}}
    found = {"date": date, "is_gpu": is_gpu, "size": size, "machine": {"name": "A1"}, "parts": parts}
    (folder / f"gpu-{date}.json").write_text(json.dumps(found))
    return results_in(folder)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], NEVER),
        ([row("wave: height [1]", "skipped")], NEVER),
        ([row("tide: height", "held")], NEVER),
        (
            [row("wave: height [1]", "held"), row("wave: height [2]", "held"), row("wave: length", "held")],
            "2027-01-02, A1: 3 held",
        ),
        (
            [row("wave: height [1]", "held"), row("wave: length", "failed")],
            "2027-01-02, A1: 1 of 2 failed",
        ),
        ([row("wave: height", "held")], "2027-01-02, A1: 1 held, 1 not run"),
        ([row("wave: height", "skipped"), row("wave: length", "held")], NEVER),
    ],
    ids=["no rows", "skipped", "another's", "all held", "one failed", "one not run", "the first skipped"],
)
def test_a_feature_ran_if_rows_that_prove_it_did(rows, said, tmp_path):
    assert last_run(FEATURE, filed(tmp_path, "2027-01-02", equalities=rows)) == said


def test_the_figure_is_the_first_value_of_its_row(tmp_path):
    rows = [row("wave, low: torch", "measured", 3.0, "m"), row("wave, high: ours", "measured", 2.345, "m")]
    assert figure_of(FEATURE, filed(tmp_path, "2027-01-02", kernels=rows)) == (
        "2.35 m (wave, high: ours; 2027-01-02, A1)"
    )
    assert figure_of(FEATURE, []) == ""


def test_only_whole_results_of_gpus_count_the_newest_first(tmp_path):
    assert results_in(tmp_path) == []
    filed(tmp_path, "2027-01-01")
    filed(tmp_path, "2027-01-03", is_gpu=False)
    filed(tmp_path, "2027-01-04", size="tiny")
    filed(tmp_path, "2027-01-02")
    assert [result.about for result in results_in(tmp_path)] == ["2027-01-02, A1", "2027-01-01, A1"]


def test_a_result_without_a_features_rows_says_nothing_of_it(tmp_path):
    filed(
        tmp_path,
        "2027-01-01",
        equalities=[row("wave: height", "held"), row("wave: length", "held")],
        kernels=[row("wave, high: ours", "measured", 2.0, "m")],
    )
    results = filed(tmp_path, "2027-01-02", kernels=[row("wave, high: ours", "measured", 1.0, "m")])
    assert last_run(FEATURE, results) == "2027-01-01, A1: 2 held"
    assert figure_of(FEATURE, results) == "1 m (wave, high: ours; 2027-01-02, A1)"


def test_lines_are_of_code_in_a_file_a_folder_or_one_name(tmp_path):
    (tmp_path / "a.py").write_text('"""Doc."""\n\nx = 1\n\n\nclass A:\n    """Doc."""\n\n    y = 2\n')
    (tmp_path / "b.h").write_text("// no\nint x;\n")
    assert [lines_of(where, tmp_path) for where in ("a.py", ".", "a.py::A")] == [3, 4, 2]
    for absent in ("c.py", "a.py::B"):
        with pytest.raises(SystemExit, match=rf"names {absent}, which is not there"):
            lines_of(absent, tmp_path)


def test_features_that_ran_are_results_and_the_others_limits(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    other = Feature(what="Tides", hardware="a moon", files=("a.py",), proof=())
    result = filed(tmp_path, "2027-01-02", equalities=[row("wave: height", "held")])
    never = never_section([FEATURE, other], result)
    assert "1 of 2 features never ran" in never
    assert never.splitlines()[-1] == "| Tides | a moon; `make gpu` does not test it |"
    assert "Waves" not in never
    ran = ran_section([FEATURE, other], result, tmp_path)
    assert ran.splitlines()[-1].startswith("| Waves | a sea | 1 | 2027-01-02, A1: 1 held")
    assert "Tides" not in ran


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.what)
def test_every_equality_that_proves_a_feature_is_tested(feature):
    names = set()
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                words = node.name.removeprefix("test_").replace("_", " ")
                names.add(f"equalities: {path.stem.removeprefix('test_')}: {words}")
    for pattern in feature.proof:
        if pattern.startswith("equalities:"):
            assert any(name.startswith(pattern.partition("*")[0]) for name in names), pattern
