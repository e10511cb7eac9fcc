"""`penstock launch logs`: what a rank of a launched run printed."""

import argparse
import sys
from pathlib import Path

from penstock.cli.launch_work import folder_of
from penstock.core import clock
from penstock.core.errors import PenstockError, UsageError
from penstock.launch.engines.engine import ENGINES
from penstock.launch.job_folder import JobFolder

EPILOG = """\
All starts of a rank are in one log, one below the other. -f goes on until the job ends.

example:
  penstock launch logs runs/first
  penstock launch logs runs/first -f --rank 3

exit codes: 0 printed, 1 the rank has printed nothing, 2 wrong usage
"""

_LOOK_S, _ASK_EVERY_S = 0.3, 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with what is printed, until the job ends"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="rank; default: 0")


def run(arguments: argparse.Namespace) -> int:
    """Print the log."""
    folder = folder_of(arguments.run)
    job = folder.job()  # raises for a run that was not launched
    if arguments.rank < 0:
        raise UsageError("--rank must be at least 0", got=arguments.rank)
    if job.engine == "kubernetes":
        from penstock.launch.engines.kubernetes_logs import logs

        for line in logs(job, folder, arguments.rank, follow=arguments.follow):
            print(line, end="", flush=True)
        return 0
    path = folder.log_of(arguments.rank)
    if not path.is_file() and not arguments.follow:
        known = ", ".join(map(str, folder.ranks_with_logs())) or "none yet"
        raise PenstockError(f"Rank {arguments.rank} has printed nothing", fix=f"Ranks with a log: {known}.")
    at = _print_from(path, 0)
    if not arguments.follow:
        return 0
    asked = clock.monotonic()
    while True:
        at = _print_from(path, at)
        if clock.monotonic() - asked > _ASK_EVERY_S:
            if not _is_live(folder):
                _print_from(path, at)
                return 0
            asked = clock.monotonic()
        clock.sleep(_LOOK_S)


def _is_live(folder: JobFolder) -> bool:
    job = folder.job()
    return ENGINES[job.engine].state(job, folder).is_live


def _print_from(path: Path, at: int) -> int:
    if not path.is_file():
        return at
    with path.open("rb") as file:
        file.seek(at)
        while piece := file.read(1 << 16):
            sys.stdout.write(piece.decode(errors="replace"))
            at += len(piece)
    sys.stdout.flush()
    return at
