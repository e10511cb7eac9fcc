"""The kernels for GPUs: interpreted on the CPU against what is written out in float64, and compiled."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="NOT TESTED: there is no Triton for this machine"
)


def run(what, tmp_path, **variables):
    words = [sys.executable, "-m", "tests.unit.nn.trying_triton", what]
    variables = {**os.environ, **variables, "TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run(words, capture_output=True, text=True, check=False, env=variables)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_what_is_interpreted_is_what_is_written_out(tmp_path):
    run("interpret", tmp_path, TRITON_INTERPRET="1")


def test_kernels_of_an_8b_model_compile_for_two_generations_of_gpus(tmp_path):
    shared = [int(line) for line in run("compile", tmp_path).split()]
    assert len(shared) == 25 + 13  # of each kernel once for the older; check_triton_kernels.py has the others
    assert max(shared) < 99 * 2**10  # bytes that a program may have on every GPU since the A100
