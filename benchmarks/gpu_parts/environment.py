"""The environment of a part's process."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(*, is_tiny: bool = False) -> dict[str, str]:
    """Return the variables of a part: it imports from this checkout, and asks no network for models.

    Args:
        is_tiny: threads would wait for each other longer than they compute, so there is one.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks"), *([inherited] if inherited else [])]
    fixed = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    threads = {"OMP_NUM_THREADS": "1"} if is_tiny else {}
    return {**threads, **os.environ, "PYTHONPATH": os.pathsep.join(paths), **fixed}
