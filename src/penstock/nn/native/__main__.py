"""Build the C++ operators ahead of their first use: `python -m penstock.nn.native`."""

from penstock.core.native_build import run_build
from penstock.nn.native import unit

run_build(unit())
