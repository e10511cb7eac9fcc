"""`penstock checkpoint verify`: check every byte of checkpoints by their checksums."""

import argparse
import json
from functools import partial

from penstock.checkpoint.find import saved_at
from penstock.checkpoint.layout import name_of
from penstock.checkpoint.reader import faults
from penstock.cli.progress import Display
from penstock.core.errors import CheckpointError
from penstock.core.units import plural

EPILOG = """\
Checks of every file: present, size, the checksums of its header and of each MiB; and that the files have
every element of every tensor. A run that resumes makes the same checks on what it reads, and uses an older
checkpoint if the newest is damaged.

example:
  penstock checkpoint verify runs/first
  penstock checkpoint verify runs/first --step 2000

exit codes: 0 all are sound, 1 faults found (all are listed) or no checkpoint, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--step", type=int, metavar="N", help="only the checkpoint of this step")


def run(arguments: argparse.Namespace) -> int:
    """Verify; list every fault."""
    found = saved_at(arguments.run)
    if arguments.step is not None:
        found = [saved for saved in found if saved.name == name_of(arguments.step)]
    if not found:
        which = "" if arguments.step is None else f" of step {arguments.step}"
        raise CheckpointError(
            f"{arguments.run} has no complete checkpoint{which}", fix="See `penstock checkpoint list`."
        )
    wrong = {}
    with Display() as display:
        for saved in found:
            wrong[str(saved)] = faults(saved, progress=partial(display.show, f"verify {saved.name}"))
    if arguments.json:
        rows = [{"path": path, "sound": not said, "faults": said} for path, said in wrong.items()]
        print(json.dumps(rows))
    else:
        for path, said in wrong.items():
            print("\n".join(said) if said else f"{path} is sound.")
        if count := sum(map(len, wrong.values())):
            print(f"{plural(count, 'fault')} in {plural(len(found), 'checkpoint')}.")
    return 1 if any(wrong.values()) else 0
