"""`penstock launch logs`: what a rank of a launched run printed."""

import argparse
import codecs
import sys
from pathlib import Path

from penstock.cli.options import RunOptions, add_fields, options_of
from penstock.core import clock
from penstock.core.errors import PenstockError, UsageError
from penstock.launch.engines.engine import ENGINES, EngineUnreachable
from penstock.launch.job_folder import JobFolder

EPILOG = """\
All starts of a rank are in one log, one below the other. -f follows it until the job ends.

example:
  penstock launch logs runs/first
  penstock launch logs runs/first -f --rank 3

exit codes: 0 printed, 1 the rank has printed nothing, or the engine and the log were silent for ten
minutes, 2 wrong usage
"""

_POLL_S, _ASK_EVERY_S = 0.3, 5.0
_MAX_SILENCE_S = 600.0
"""Seconds without an answer of the engine, and without a new line, after which the job is not waited for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, RunOptions)
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the job ends")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="rank; default: 0")


def run(arguments: argparse.Namespace) -> int:
    """Print the log."""
    folder = JobFolder(options_of(arguments, RunOptions).run.absolute())
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
    log = GrowingLog(path)
    log.print_new()
    if arguments.follow:
        _follow(log, folder)
    return 0


def _follow(log: "GrowingLog", folder: JobFolder) -> None:
    """Print what is added to a log until the job ends.

    Raises:
        EngineUnreachable: neither the engine nor the log has said anything for long.
    """
    asked_at = heard_at = clock.monotonic()
    while True:
        now = clock.monotonic()
        if log.print_new():
            heard_at = now
        if now - asked_at > _ASK_EVERY_S:
            job = folder.job()
            try:
                if not ENGINES[job.engine].state(job, folder).is_live:
                    log.print_new()
                    return
                heard_at = now
            except EngineUnreachable:  # as a controller that is busy for a while
                if now - heard_at > _MAX_SILENCE_S:
                    raise
            asked_at = clock.monotonic()
        clock.sleep(_POLL_S)


class GrowingLog:
    """A log file that is printed as it grows. A character that is half written waits for its rest."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_read = path, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def print_new(self) -> bool:
        """Print what was added since the last call; return whether anything was."""
        before = self._num_read
        if not self._path.is_file():
            return False
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            while piece := file.read(1 << 16):
                self._num_read += len(piece)
                sys.stdout.write(self._decoder.decode(piece))
        sys.stdout.flush()
        return self._num_read > before
