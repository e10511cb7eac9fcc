"""`python -m penstock`: the same as the `penstock` command."""

import sys

from penstock.cli.main import main

sys.exit(main())
