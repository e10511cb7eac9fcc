"""Build the loader's compiled loops ahead of their first use: `python -m penstock.data.native`."""

from penstock.core.native_build import run_build
from penstock.data.native import unit

run_build(unit())
