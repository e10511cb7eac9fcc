"""The C++ operators on a CPU without AVX-512: the same files, compiled for the oldest of its kind."""

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
from penstock.nn.native import build
others = {"-march=native": "-march=x86-64", "-O3": "-O1"}  # the second for the compiler's time
build.FLAGS = tuple(others.get(flag, flag) for flag in build.FLAGS)
assert native.is_available()
tests = [f"tests/unit/nn/test_{name}.py" for name in ("paged", "native_rows")]
sys.exit(pytest.main(["-q", "-x", "-n", "0", *tests]))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="what this machine compiles is portable already")
@pytest.mark.skipif("avx512f" not in env.cpu_features(), reason="the other tests run this code here")
@pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")
def test_the_operators_compute_the_same_without_avx512(tmp_path):
    variables = os.environ | {"PENSTOCK_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
