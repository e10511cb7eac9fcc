"""The C++ operators on CPUs without AVX-512: the same files, compiled for older CPUs.

check_portable_operators.py compiles them for the oldest.
"""

import os
import platform
import subprocess
import sys

import pytest

from penstock.core import env
from penstock.nn import native

RUN = """
import sys
import pytest
from penstock.nn import native
assert native.is_available()
assert not native.torch.ops.penstock.multiplies_integers()
sys.exit(pytest.main(["-q", "-x", "-n", "0", *sys.argv[1:]]))
"""
PATHS = [f"tests/unit/nn/test_{name}.py" for name in ("paged", "native_rows", "serving_linears")]
STEPS = [f"tests/unit/engine/{name}.py" for name in ("model_runner/test_whole_steps", "test_whole_adapters")]

pytestmark = [
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="what this machine compiles is portable already"
    ),
    pytest.mark.skipif("avx512f" not in env.cpu_features(), reason="the other tests run this code here"),
    pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here"),
]


def run(code, paths, variables):
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        env=os.environ | {"PENSTOCK_NATIVE": "wait"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_operators_compute_the_same_with_avx2_alone():
    run(RUN, [*PATHS, *STEPS], {"PENSTOCK_NATIVE_BASELINE": "x86-64-v3"})
