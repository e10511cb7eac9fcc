"""`penstock` and `python -m penstock`: the command line; Ctrl-C ends it without a traceback as it loads."""

import sys

from penstock.cli.interrupts import leave_on_interrupt


def main() -> int:
    """Run the command that the process was started for; return its exit code."""
    leave_on_interrupt()
    from penstock.cli.main import main as run  # a tenth of a second

    return run()


if __name__ == "__main__":
    sys.exit(main())
