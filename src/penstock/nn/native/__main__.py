"""Build the C++ operators ahead of their first use: `python -m penstock.nn.native`."""

import sys

from penstock.core.native_build import NotBuilt
from penstock.nn.native.build import built_library

try:
    sys.stdout.write(f"{built_library()}\n")
except (NotBuilt, OSError) as error:
    sys.exit(str(error))
