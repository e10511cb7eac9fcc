"""The GPU kit as a user runs it, on a CPU with tiny shapes: nothing is claimed.

check_gpu_kit.py runs all of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAID = "NOTHING WAS MEASURED ON A GPU"
LONGEST_S = 600  # longer than the kit takes by its own clock


def kit(out, *words):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py", "--out", out, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_S,
        cwd=out.parent,
        env=environment,
    )


def test_rows_run_on_a_cpu_and_say_that_this_measured_nothing(tmp_path):
    out = tmp_path / "kit"
    done = kit(out, "--device", "cpu", "--size", "tiny", "--rows", "train-1b,draws,plan")
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr
    assert "equalities: 1 not reached" in done.stdout, "a result without them proves nothing"
    assert "Traceback" not in done.stderr
    assert SAID in done.stdout.splitlines()[0]
    (path,) = out.glob("*.json")
    result = json.loads(path.read_text())
    assert SAID in result["warning"]
    assert {name: part["ended"] for name, part in result["parts"].items()} == dict.fromkeys(
        ["training", "kernels", "planner"], "done"
    )
    assert all(row["is_met"] is None for part in result["parts"].values() for row in part["rows"])


def test_without_a_gpu_it_says_what_is_missing(tmp_path):
    done = kit(tmp_path / "kit", "--device", "cuda:77")
    assert done.returncode == 2
    assert "Nothing can be computed on cuda:77" in done.stderr
    assert "--device cpu --size tiny" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "kit").exists()


def test_a_case_or_a_command_that_is_not_there_is_refused(tmp_path):
    done = kit(tmp_path / "kit", "--rows", "train-1b,serve-8")
    assert done.returncode == 2
    assert "There is no case 'serve-8'. Did you mean 'serve-8b'?" in done.stderr
    done = kit(tmp_path / "kit", "--part", "fast")
    assert done.returncode == 2
    assert "There is no part 'fast'. Parts: speed, rest." in done.stderr
