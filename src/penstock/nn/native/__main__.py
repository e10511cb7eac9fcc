"""Build the C++ operators ahead of their first use: `python -m penstock.nn.native`."""

import sys

from penstock.nn.native.build import NotBuilt, built_library

try:
    sys.stdout.write(f"{built_library()}\n")
except NotBuilt as error:
    sys.exit(str(error))
