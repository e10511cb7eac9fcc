"""The C++ operators on the oldest CPUs of 64 bits: `make soak PART=operators`."""

from tests.integration.test_portable_operators import PATHS, RUN, pytestmark, run

__all__ = ["pytestmark"]

OLDEST = """
from penstock.core import native_build
from penstock.core.native_build import Baseline
flags = ("-march=x86-64", "-O1")  # the second for the compiler's time
native_build._chosen_baselines = lambda: [Baseline(name="oldest", flags=flags, needs=frozenset())]
"""


def test_the_operators_compute_the_same_on_the_oldest_cpus(tmp_path):
    run(OLDEST + RUN, PATHS, {"PENSTOCK_CACHE": str(tmp_path / "cache")})
