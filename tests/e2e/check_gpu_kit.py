"""The whole GPU kit as a user runs it, on a CPU with tiny shapes: three minutes of `make soak PART=kit`."""

import json
import re
import subprocess
import sys

import pytest

from tests.e2e.test_gpu_kit import LONGEST_S, ROOT, SAID, kit

PARTS = ["training", "serving", "kernels", "equalities", "tuning", "planner"]


@pytest.mark.timeout(700)
def test_the_kit_runs_on_a_cpu_and_says_that_this_measured_nothing(tmp_path):
    out = tmp_path / "kit"
    done = subprocess.run(
        ["make", "--silent", "gpu", "DEVICE=cpu", "SIZE=tiny", f"OUT={out}", f"PYTHON={sys.executable}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert SAID in lines[0]
    assert SAID in lines[-1]

    files = sorted(out.iterdir())
    assert len([file for file in files if not file.name.endswith(".trace.json.gz")]) <= 8
    assert all(re.fullmatch(r"not-a-gpu-[A-Za-z0-9._-]+", file.name) for file in files)
    (path,) = out.glob("*.json")
    result = json.loads(path.read_text())
    assert SAID in result["warning"]
    assert not result["is_gpu"]
    assert list(result["parts"]) == PARTS
    assert {name: part["ended"] for name, part in result["parts"].items()} == dict.fromkeys(PARTS, "done")
    failed = [row for part in result["parts"].values() for row in part["rows"] if row["status"] == "failed"]
    assert not failed
    assert all(row["is_met"] is None for part in result["parts"].values() for row in part["rows"])
    held = [row["name"] for row in result["parts"]["equalities"]["rows"] if row["status"] == "held"]
    files_of_tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {name.partition(":")[0] for name in held} == files_of_tests
    page = path.with_suffix(".md").read_text()
    assert page.count(SAID) >= 2
    assert "every equality held" in page

    # a part again, into the same result
    again = kit(out, "--device", "cpu", "--size", "tiny", "--rows", "plan")
    assert again.returncode == 0, again.stdout + again.stderr
    merged = json.loads(path.read_text())
    assert list(merged["parts"]) == PARTS
    assert merged["parts"]["training"] == result["parts"]["training"]
    assert merged["parts"]["planner"]["began"] >= result["parts"]["planner"]["began"]

    # what is there already is not run again
    resumed = kit(out, "--device", "cpu", "--size", "tiny", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert json.loads(path.read_text())["parts"] == merged["parts"]
