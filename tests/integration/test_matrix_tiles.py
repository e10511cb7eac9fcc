"""Products by the matrix tiles of Intel's CPUs: with imitated instructions, since few machines have them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.nn import native
from penstock.nn.native import build
from penstock.nn.packed import can_multiply

HERE = Path(__file__).parent
RUN = """
import sys
import pytest
import torch
from penstock.nn import native
from penstock.nn.native import build
sources = build._sources
needed = ("linear.cpp", "pack.cpp", "paged_attention.cpp")  # the others for the compiler's time, as is -O1
build._sources = lambda: [one for one in sources() if one.suffix == ".h" or one.name in needed]
build.FLAGS = (*build.FLAGS, "-O1", "-DIMITATED_TILES", "-I" + sys.argv[1])
native.FAKES = {}
assert native.is_available()
assert torch.ops.penstock.has_tiles()
tests = ["tests/unit/nn/test_serving_linears.py", "tests/unit/nn/test_paged.py"]
some = "operator or sizes or native or neighbours or computes"
sys.exit(pytest.main(["-q", "-x", "-n", "0", "-k", some, *tests]))
"""
FLAGS = ("-std=c++20", "-O3", "-Wall", "-Wextra", "-mavx512f", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
MULTIPLY = """
#include "tiles.h"
void multiply(penstock::tiles::Task& pairs, penstock::tiles::Task& bytes) {
  if (!penstock::tiles::usable()) return;
  penstock::tiles::Unit unit;
  unit.multiply<penstock::tiles::PAIRS>(pairs);
  unit.multiply<penstock::tiles::BYTES>(bytes);
}
"""


@pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")
@pytest.mark.skipif(not can_multiply(8, torch.zeros(())), reason="this CPU has no such operators")
def test_the_operators_compute_the_same_by_imitated_tiles(tmp_path):
    variables = os.environ | {"PENSTOCK_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(HERE)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")
def test_the_real_instructions_compile(tmp_path):
    compiler, code, text = build._compiler(), tmp_path / "multiply.cpp", tmp_path / "multiply.s"
    code.write_text(MULTIPLY)
    command = [compiler, *FLAGS, f"-I{build.SOURCES}", "-S", str(code), "-o", str(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized" in done.stderr or "unknown" in done.stderr or "unsupported" in done.stderr:
        pytest.skip("this compiler does not know the instructions, so the operators do without")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease"):
        assert instruction in text.read_text()
