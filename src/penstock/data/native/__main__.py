"""Build the loader's compiled loops ahead of their first use: `python -m penstock.data.native`."""

import sys

from penstock.core.native_build import NotBuilt
from penstock.data.native import built_library

try:
    sys.stdout.write(f"{built_library()}\n")
except (NotBuilt, OSError) as error:
    sys.exit(str(error))
