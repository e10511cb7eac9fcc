"""Each folder of unit tests passes alone, in any order: `make soak PART=alone`."""

import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parent / "unit"
FOLDERS = sorted(path.name for path in UNIT.iterdir() if [*path.rglob("test_*.py")])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_passes_alone_in_random_order(folder):
    """Starts a pytest, whose process no other folder has touched; pytest-randomly draws the order."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", UNIT / folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=UNIT.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
