"""Every benchmark opens with the package as it is, and a short one runs; check_benchmarks.py runs each."""

import json
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.e2e.check_benchmarks import BENCHMARKS, OWN_TEST, RUNS, TOO_LONG, TWO_VERSIONS, run

SCRIPTS = {path.stem for path in BENCHMARKS.glob("*.py") if "def main" in path.read_text()}


def ask_for_help(name):
    """Be a benchmark that is asked for its help."""
    sys.path.insert(0, str(BENCHMARKS))
    sys.argv = [f"{name}.py", "--help"]
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")


# Python 3.12 warns of a fork where other tests have left library threads; this child uses none.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_benchmark_imports_all_it_needs_of_the_package(name):
    process = get_context("fork").Process(target=ask_for_help, args=(name,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    process.close()


@pytest.mark.parametrize("name", ["plan_accuracy", "wire_codecs"])
def test_a_benchmark_runs_and_files_its_result(name, tmp_path):
    run(name, tmp_path)


def test_a_stress_run_that_is_cut_off_leaves_what_it_did(tmp_path):
    command = [sys.executable, BENCHMARKS / "loader_stress.py", "--out", tmp_path]
    command += ["--tokens", "10G", "--corpus-tokens", "1M"]
    command += ["--changes", "2", "--save-every", "1M", "--kill-every", "2"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    said = run.stdout.readline()  # the file is written before the second line
    run.stdout.readline()
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=120)
    assert "of 10G tokens" in said
    assert "to go" in said
    (path,) = tmp_path.glob("loader_stress_unfinished-*.json")
    result = json.loads(path.read_text())
    assert result["finished"] is False
    assert 0 < result["tokens"] < 10**10
    assert result["epochs_wrong"] == []


def test_every_benchmark_is_run():
    assert set(RUNS) | TOO_LONG | TWO_VERSIONS | OWN_TEST == SCRIPTS
