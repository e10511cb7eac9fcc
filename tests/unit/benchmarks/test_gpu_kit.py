"""The frame of the GPU kit with real processes: budgets, parts that hang or die, what counts as held."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from gpu_parts.part import Part
from gpu_parts.verdict import judge

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

DRIVER = """
import sys
from pathlib import Path
sys.path[:0] = [{src!r}, {benchmarks!r}]
from gpu_parts.cases import RESERVE_S, Case
from gpu_parts.kit import Kit
from gpu_parts.result import Result
from gpu_parts.stopping import raise_on_signals
from gpu_parts.unfit import Unfit

raise_on_signals()
here = Path(__file__).parent
machine = dict(name={gpu!r}, host=dict(cpu="x", cores=2, system="y"), cuda=None, versions=dict(torch="9"))
cases = tuple(Case(*case, ()) for case in {cases!r})
{fault}
try:
    result = Result.open(here / "out", machine=machine, device={device!r}, size="full", is_added={is_added})
    sys.exit(Kit(
        cases=cases, result=result, device={device!r}, size="full", scripts=here,
        total_s={total_s} + RESERVE_S, start_s=0.0, grace_s=0.5,
    ).run())
except Unfit as error:
    sys.exit(f"unfit: {{error}}")
"""
PART = """
import json, os, subprocess, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
asked = dict(word.rsplit(":", 1) for before, word in zip(sys.argv, sys.argv[1:]) if before == "--case")
budget = float(list(asked.values())[0])
rows, cases = [], {}
def file(name, status="held", expected=(), is_done=False, why="", case="", value=None, **target):
    if name:
        figure = dict(value=value, unit="t/s", **{"target": None, "is_met": None, **target})
        rows.append(dict(name=name, status=status, why=why, case=case, **figure))
    with open(out + ".new", "w") as written:
        json.dump(dict(rows=rows, expected=list(expected), is_done=is_done, cases=cases), written)
    os.replace(out + ".new", out)
def run(**works):
    for case in asked:
        cases[case] = dict(ended="runs", expected=[])
        file("")
        works[case]()
        cases[case]["ended"] = "done"
    file("", is_done=True)
"""
HELD = "file('a', expected=['a', 'b']); file('b', expected=['a', 'b'], is_done=True)"


def start(folder, parts, *, total_s=30.0, device="cpu", gpu="none", is_added=False, cases=(), fault=""):
    """Start the kit.

    Args:
        parts: name -> the end of its script.
        cases: (name, part, budget in seconds); by default one of each part, for equal shares of the time.
        fault: what the kit's process does before it begins.
    """
    for name, body in parts.items():
        (folder / f"{name}.py").write_text(PART + body)
    driver = folder / "driver.py"
    driver.write_text(
        DRIVER.format(
            src=str(BENCHMARKS.parent / "src"),
            benchmarks=str(BENCHMARKS),
            cases=list(cases) or [(name, name, total_s / len(parts)) for name in parts],
            total_s=total_s,
            device=device,
            gpu=gpu,
            is_added=is_added,
            fault=fault,
        )
    )
    return subprocess.Popen(
        [sys.executable, driver], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ran(folder, parts, **options):
    """Run parts to their end; return the exit code, the result and the page."""
    process = start(folder, parts, **options)
    out, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    (path,) = (folder / "out").glob("*.json")
    return process.returncode, json.loads(path.read_text()), path.with_suffix(".md").read_text(), out


def test_all_is_well_where_every_equality_held_whatever_figures_miss(tmp_path):
    missed = "file('speed', 'measured', value=3.0, target=4.0, is_met=False, is_done=True)"
    code, result, page, _ = ran(tmp_path, {"equalities": HELD, "training": missed})
    assert code == 0
    assert result["is_finished"]
    assert not result["is_gpu"]
    assert "every equality held (2 held)" in page
    assert "Targets missed: 1 (speed)" in page
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(names) == 4
    assert all(name.startswith("not-a-gpu-") for name in names)
    svg = next(path for path in (tmp_path / "out").iterdir() if path.suffix == ".svg")
    assert "NOTHING WAS MEASURED ON A GPU" in svg.read_text()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("file('a', expected=['a', 'b']); file('b', 'failed', ['a', 'b'], True, 'off by 3')", "b: off by 3"),
        ("file('a', expected=['a', 'b'])", "- b"),
        ("file('a', expected=['a', 'b']); os.abort()", "was ended by SIGABRT"),
        ("raise SystemError('driver fell over')", "driver fell over"),
        ("file('', expected=[], is_done=True)", "none was run"),
        ("file('a', 'skipped', ['a'], True, 'needs another card')", "a: needs another card"),
    ],
)
def test_what_failed_or_was_not_reached_is_named_and_is_not_held(body, named, tmp_path):
    code, result, page, _ = ran(tmp_path, {"equalities": body, "later": HELD})
    assert code == 1
    assert named in page
    assert "NOT proven" in page
    assert result["parts"]["later"]["ended"] == "done"


def test_a_part_that_hangs_is_killed_with_its_children_and_the_next_gets_what_is_left(tmp_path):
    hangs = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
file(str(child.pid), expected=['x'])
time.sleep(600)
"""
    tells = "file('budget', 'measured', value=budget, is_done=True)"
    shares = [("equalities", "equalities", 3.0), ("later", "later", 100.0), ("last", "last", 100.0)]
    bodies = {"equalities": hangs, "later": tells, "last": tells}
    code, result, page, _ = ran(tmp_path, bodies, cases=shares, total_s=203.0)
    parts = result["parts"]
    assert code == 1
    assert "was killed after" in page
    assert "- x" in page
    (row,) = parts["equalities"]["rows"]
    deadline = time.monotonic() + 5
    while is_running(int(row["name"])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(row["name"]))
    later, last = (parts[name]["rows"][0]["value"] for name in ("later", "last"))
    assert later < 103.0  # its own share
    assert last > later + 50.0  # and what that did not use


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_was_filed(number, tmp_path):
    body = "file('a', expected=['a', 'b']); print('waiting', os.getpid(), flush=True); time.sleep(600)"
    process = start(tmp_path, {"equalities": body, "later": HELD})
    line = next(line for line in process.stdout if line.startswith("waiting"))
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    (path,) = (tmp_path / "out").glob("*.json")
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["parts"]["equalities"]["rows"]] == ["a"]
    assert not result["is_finished"]
    assert "Stopped before the end" in path.with_suffix(".md").read_text()
    assert not is_running(int(line.split()[1]))


STOPPED_WHILE_IT_TAKES = """
import os, signal
take = Result.take
def stopped(*given):
    Result.take = take
    os.kill(os.getpid(), signal.SIGTERM)
    take(*given)
Result.take = stopped
"""


def test_a_signal_between_the_reading_of_rows_and_their_taking_loses_none(tmp_path):
    body = "file('a', expected=['a', 'b']); time.sleep(600)"
    code, result, _, _ = ran(tmp_path, {"equalities": body}, fault=STOPPED_WHILE_IT_TAKES)
    assert code == 128 + signal.SIGTERM
    assert [row["name"] for row in result["parts"]["equalities"]["rows"]] == ["a"]


def test_a_part_that_the_time_does_not_reach_is_named(tmp_path):
    code, result, page, out = ran(tmp_path, {"training": HELD, "equalities": HELD}, total_s=0.4)
    assert code == 1
    assert "was not reached: the time was over" in result["parts"]["training"]["ended"]
    assert "equalities: was not reached: the time was over" in out
    assert "all of them" in page


CASES_OF_PART = """
def first(): file('1', 'measured', value=1.0, case='first')
def second(): BREAK
def third(): file('3', 'measured', value=3.0, case='third')
run(first=first, second=second, third=third)
"""
TRAINING = [("first", "training", 5.0), ("second", "training", 2.0), ("third", "training", 5.0)]


@pytest.mark.parametrize(
    ("breaks", "ended"),
    [
        ("os.abort()", "was ended by SIGABRT"),
        ("time.sleep(600)", "was killed after"),
        ("sys.exit(70)", "ended with exit code 70"),
    ],
)
def test_a_case_that_ends_its_process_costs_itself_and_the_rest_goes_on(breaks, ended, tmp_path):
    body = CASES_OF_PART.replace("BREAK", f"file('2', 'measured', value=2.0, case='second'); {breaks}")
    _, result, page, _ = ran(tmp_path, {"training": body}, cases=TRAINING, total_s=14.0)
    part = result["parts"]["training"]
    assert [row["name"] for row in part["rows"]] == ["1", "2", "3"]
    how = {name: case["ended"] for name, case in part["cases"].items()}
    assert (how["first"], how["third"]) == ("done", "done")
    assert ended in how["second"]
    assert not part["is_done"]
    assert f"second: {ended}" in page


def test_a_case_that_runs_again_replaces_its_rows_and_no_others(tmp_path):
    body = CASES_OF_PART.replace("BREAK", "os.abort()")
    ran(tmp_path, {"training": body}, cases=TRAINING)
    body = CASES_OF_PART.replace("BREAK", "file('two', 'measured', value=9.0, case='second')")
    _, result, _, _ = ran(tmp_path, {"training": body}, cases=TRAINING[1:2], is_added=True)
    part = result["parts"]["training"]
    assert [row["name"] for row in part["rows"]] == ["1", "3", "two"]
    assert part["is_done"]
    assert part["ended"] == "done"


def test_parts_are_added_to_the_result_of_the_same_gpu_and_of_no_other(tmp_path):
    gpu = {"device": "cuda", "gpu": "H0"}
    code, *_ = ran(tmp_path, {"equalities": HELD}, **gpu)
    assert code == 0
    reads = """
before = json.load(open(os.path.join(os.path.dirname(out), "equalities.json")))
file(before["rows"][1]["name"], 'measured', value=1.0, is_done=True)
"""
    code, result, _, _ = ran(tmp_path, {"planner": reads}, is_added=True, **gpu)
    assert code == 0
    assert result["is_gpu"]
    assert list(result["parts"]) == ["equalities", "planner"]
    assert result["parts"]["planner"]["rows"][0]["name"] == "b"
    other = start(tmp_path, {"planner": HELD}, is_added=True, device="cuda", gpu="H1")
    _, errors = other.communicate(timeout=60)
    assert "is of another GPU (H0, now H1). Name another --out." in errors


TESTS = {
    "test_attention.py": "def test_holds(): pass\ndef test_fails(): assert 2 + 2 == 5\n",
    "test_crashing.py": "import os\ndef test_first(): os.abort()\ndef test_then(): pass\n",
    "test_hanging.py": "import time\ndef test_hangs(): time.sleep(600)\ndef test_then(): pass\n",
    "test_wrong.py": "import no_such_package\ndef test_never(): pass\n",
    "test_without.py": "import pytest\npytest.importorskip('no_such')\ndef test_never(): pass\n",
    "test_zero.py": "import pytest\n@pytest.mark.parametrize('n', [3])\ndef test_skips_it(n):"
    " pytest.skip('needs a Blackwell')\n",
}
RUNNER = """
import sys, torch
from pathlib import Path
from gpu_parts import equalities
from gpu_parts.part import Part
from gpu_parts.verdict import judge

equalities.TEST_S["cpu"] = 3.0
folder = Path(sys.argv[1])
part = Part("equalities", torch.device("cpu"), True, 90.0, folder / "rows.json")
run = equalities.Run(part, sys.argv[2:], folder, folder / "record", lambda: part.expect(run.names()))
assert run.to_the_end()
part.done()
"""


def test_a_test_that_ends_hangs_or_cannot_begin_costs_itself_alone(tmp_path):
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--device')\n    parser.addoption('--size')\n"
    )
    names = [name.removeprefix("test_").removesuffix(".py") for name in TESTS]
    paths = [BENCHMARKS, BENCHMARKS.parent / "src"]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, tmp_path, *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    rows = {row["name"]: (row["status"], row["why"]) for row in found["rows"]}
    assert sorted(rows) == sorted(found["expected"])
    assert {name: status for name, (status, _) in rows.items()} == {
        "wrong: all of it": "failed",
        "without: all of it": "skipped",
        "attention: holds": "held",
        "attention: fails": "failed",
        "crashing: first": "failed",
        "crashing: then": "held",
        "hanging: hangs": "failed",
        "hanging: then": "held",
        "zero: skips it [3]": "skipped",
    }
    assert "no_such_package" in rows["wrong: all of it"][1]
    assert "assert (2 + 2) == 5" in rows["attention: fails"][1]
    assert "was ended by SIGABRT" in rows["crashing: first"][1]
    assert re.search(r"was killed after \d+ s", rows["hanging: hangs"][1])
    assert rows["zero: skips it [3]"][1] == "needs a Blackwell"


SABOTAGED = """
import gc, importlib, json, os, sys
import torch._dynamo
gc.freeze()
for part, fault, cases, out in json.loads(sys.argv[1]):
    module = importlib.import_module(f"gpu_parts.{part}")
    if not (child := os.fork()):
        exec(fault)
        sys.argv = [f"{part}.py", "--device", "cpu", "--size", "tiny", "--out", out,
                    *(word for case in cases for word in ("--case", case + ":100"))]
        module.main()
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{part} ended badly")
"""
"""Runs parts with faults, each in a process of its own; what most of them import is imported once."""
CRASH = "def crash(*_, **__): raise ZeroDivisionError('on purpose')\n"
FAULTS = {
    "training": ("module.Training.report", ["train-1b-eager", "checkpoint-1b"]),
    "tuning": ("module.Tuning.eight_b", ["tune-8b", "tune-8b-int4"]),
    "serving": ("module.figures", ["serve-1b", "serve-8b-vllm"]),
    "kernels": ("module.Kernels.loss", ["loss", "draws"]),
    "planner": ("module.Planner.rows", ["plan"]),
}
CANARY = """
def crash(self, *_, **__):
    self.part.measured('fine', 1.0, 's')
    raise ValueError('on purpose')
module.Training.ratio = crash
"""


@pytest.fixture(scope="module")
def sabotaged(tmp_path_factory):
    """What parts file of which something raises: by their names, and by "canary".

    Nothing is compiled: e2e/test_gpu_kit.py compiles.
    """
    folder = tmp_path_factory.mktemp("sabotaged")
    works = [
        (part, f"{CRASH}{where} = crash", cases, str(folder / part))
        for part, (where, cases) in FAULTS.items()
    ]
    works.append(("training", CANARY, ["training-canary"], str(folder / "canary")))
    paths = os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent / "src")))
    done = subprocess.run(
        [sys.executable, "-c", SABOTAGED, json.dumps(works)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir() if path.is_file()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", FAULTS)
def test_a_deliberate_crash_in_a_part_is_a_failed_row_and_the_later_cases_run(part, sabotaged):
    found, (_, cases) = sabotaged[part], FAULTS[part]
    failed = [row for row in found["rows"] if row["status"] == "failed"]
    assert failed
    assert all("ZeroDivisionError: on purpose" in row["why"] and row["case"] == cases[0] for row in failed)
    assert {name: case["ended"] for name, case in found["cases"].items()} == dict.fromkeys(cases, "done")


@pytest.mark.timeout(900)
def test_a_canary_files_what_breaks_in_tiny_shapes_and_nothing_else(sabotaged):
    rows = sabotaged["canary"]["rows"]
    assert [row["status"] for row in rows] == ["failed"]
    assert "on purpose" in rows[0]["why"]


def test_numbers_of_numpy_are_filed(tmp_path):
    part = Part("kernels", torch.device("cpu"), True, 9.0, tmp_path / "kernels.json")
    part.measured("a", np.float32(2), "s", flag=np.bool_(True), times=np.arange(2), path=tmp_path)
    (row,) = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert row["more"] == {"flag": True, "times": [0, 1], "path": str(tmp_path)}
    part.measured("a", 3.0, "s")
    (row,) = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert row["value"] == 3.0


def test_on_the_null_gpu_nothing_is_held_or_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_parts.part.is_null_gpu", lambda: True)
    part = Part("equalities", torch.device("cpu"), False, 9.0, tmp_path / "equalities.json")
    part.measured("speed", 3.0, "s", at_least=1.0)
    part.held("equal")
    part.failed("crash", "fell over")
    found = json.loads((tmp_path / "equalities.json").read_text())
    assert [row["status"] for row in found["rows"]] == ["not computed", "not computed", "failed"]
    assert [row["is_met"] for row in found["rows"]] == [None] * 3
    verdict = judge({"parts": {"equalities": {**found, "is_done": True}}})
    assert verdict.held == []
    assert verdict.not_computed == ["speed", "equal"]
    assert not verdict.is_proven


def test_on_the_null_gpu_a_test_that_fails_in_a_comparison_is_not_computed_and_a_crash_fails(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import math, torch\n"
        "def test_passes(): pass\n"
        "def test_is_below_zero(): math.sqrt(-1.0)\n"
        "def test_differs(): assert 1 == 2\n"
        "def test_is_not_close(): torch.testing.assert_close(torch.ones(2), torch.zeros(2))\n"
        "def test_crashes(): [][0]\n"
    )
    script = (
        "import sys, gpu_parts.machine as machine\n"
        "machine.is_null_gpu = lambda: True\n"
        "import pytest; pytest.main(['-p', 'gpu_parts.pytest_rows', '-q', sys.argv[1]])"
    )
    record = tmp_path / "record"
    paths = os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent / "src")))
    environment = {**os.environ, "PYTHONPATH": paths, "PENSTOCK_ROWS": str(record)}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    subprocess.run(
        [sys.executable, "-c", script, tmp_path], env=environment, cwd=tmp_path, timeout=100, check=True
    )
    said = [json.loads(line) for line in record.read_text().splitlines()]
    status = {one["ended"].partition("::test_")[2]: one["status"] for one in said if "ended" in one}
    assert status == {
        "passes": "not computed",
        "is_below_zero": "not computed",
        "differs": "not computed",
        "is_not_close": "not computed",
        "crashes": "failed",
    }
