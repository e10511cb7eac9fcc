"""Command dispatch: find the verb, import it, run it; errors become one paragraph and an exit code.

A verb is a module with `add_arguments(parser)` and `run(arguments) -> int`. Only the requested verb is
imported, so `penstock --help` loads neither torch nor numpy.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from penstock import __version__
from penstock.cli.interrupts import leave_on_interrupt, raise_on_interrupt
from penstock.cli.streams import EXIT_USAGE, complain, explain, settle_streams, write_utf8
from penstock.core import clock
from penstock.core.env import ranks, sleep_at_barriers
from penstock.core.errors import PenstockError, UsageError, near_match, nearest
from penstock.core.garbage import freeze_gc, tune_gc
from penstock.core.log import FORMATS, check_format_of_environment, choose_format
from penstock.core.table import Table

_FIRST_SPEAKS_S = 10.0
"""Delay in seconds: under torchrun all ranks find the same usage error; the first of a machine says it, and
torchrun ends the others."""

VERBS = {
    "data": "prepare, describe, verify and audit token corpora",
    "recipes": "list, show and check the recipes that come with Penstock",
    "plan": "find the fastest way to train a model on a cluster, and its memory and time",
    "train": "train a model from a recipe, on one process or many",
    "tune": "tune a model on conversations or text, all of it or an adapter",
    "launch": "run a recipe on this machine, Slurm or Kubernetes; watch, stop and resize it",
    "operator": "run TrainingRuns of a Kubernetes namespace; its Deployment types this",
    "control": "stop a running job, save, or change its mixture, batch size or islands",
    "eval": "score a model on tasks or on text, or compare two results",
    "checkpoint": "list the checkpoints of a run, or verify every byte of them",
    "export": "export a model as a Hugging Face folder, an adapter as PEFT's",
    "train-speculator": "train heads that guess tokens, for faster generation",
    "generate": "continue a prompt with a trained model",
    "chat": "chat with a trained model",
    "serve": "serve a model over HTTP, with the API of OpenAI",
    "netlab": "try a recipe on emulated hosts with a network of given speed",
    "report": "draw a run as one HTML page",
    "console": "watch and compare runs in a browser, live",
    "kernels": "measure which kernels are fastest on this device, and keep the choice",
    "doctor": "check a machine, or all machines of a cluster, before a run",
    "demo": "the whole workflow on this machine, in some ten minutes",
}


def _module_of(verb: str) -> str:
    return f"penstock.cli.{verb.replace('-', '_')}"


_MODULES = Table("command", {verb: f"{_module_of(verb)}:__name__" for verb in VERBS})

_EPILOG = """\
example:
  penstock data prepare docs/ --train-tokenizer 4096 --out corpus
  penstock train recipe.toml --set data.corpora.docs.path=corpus --processes 2
  penstock generate runs/first --prompt "Once upon"

exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped after saving (run again to resume)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    Args:
        argv: its arguments; None: those of this process, which was started for the command.
    """
    if argv is not None:
        return _main(list(argv))
    leave_on_interrupt()
    settle_streams()
    tune_gc()
    try:
        return _main(sys.argv[1:])
    finally:
        leave_on_interrupt()
        freeze_gc()


def _main(words: list[str]) -> int:
    debug = "--debug" in words
    sleep_at_barriers()
    write_utf8()
    try:
        try:
            words = _without_log_format([word for word in words if word != "--debug"])
            return _dispatch(words, debug=debug)
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is handled below
    except BrokenPipeError:  # the reader of our output exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PenstockError, KeyboardInterrupt, OSError, ModuleNotFoundError) as error:
        if debug:
            raise
        message, code = explain(error)
        if isinstance(error, UsageError) and not _is_first():
            clock.sleep(_FIRST_SPEAKS_S)
        complain(message)
        return code


def _is_first() -> bool:
    """Return True for the first rank of a machine, a rank alone, and if its variables are wrong."""
    try:
        who = ranks()
        return who.world_size == 1 or who.local_rank == 0
    except UsageError:
        return True


_LOG_FORMAT = "--log-format"


def _without_log_format(words: list[str]) -> list[str]:
    """Set the format of the log if the words name one; return the others.

    Raises:
        UsageError: there is no such format.
    """
    left: list[str] = []
    following = iter(words)
    for word in following:
        if word == _LOG_FORMAT:
            choose_format(next(following, ""))
        elif word.startswith(f"{_LOG_FORMAT}="):
            choose_format(word.partition("=")[2])
        elif word == "--":
            left += [word, *following]
        else:
            left.append(word)
    check_format_of_environment()
    return left


class _Parser(argparse.ArgumentParser):
    def parse_known_args(  # type: ignore[no-untyped-def, override]
        self, args=None, namespace=None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; report unknown arguments here, where the options of a subcommand are known."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            match = near_match(left[0], list(self._option_string_actions))
            hint = f". Did you mean {match!r}?" if match else ""
            self.error(f"unrecognized arguments: {' '.join(left)}{hint}")
        return found, left

    def error(self, message: str) -> NoReturn:
        if not _is_first():
            clock.sleep(_FIRST_SPEAKS_S)
        super().error(message)


def _dispatch(words: list[str], *, debug: bool) -> int:
    top = _Parser(
        prog="penstock",
        usage="penstock COMMAND [options]",
        description="Train, tune and serve foundation models on ordinary machines joined by Ethernet.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "".join(f"  {v:<18}{text}\n" for v, text in VERBS.items()) + "\n" + _EPILOG,
    )
    top.add_argument("--version", action="version", version=f"penstock {__version__}")
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    top.add_argument(
        _LOG_FORMAT,
        choices=[*FORMATS],
        metavar="FORMAT",
        help="text (default), logfmt or json: format of the log of any command, on standard error",
    )
    if not words or words[0].startswith("-"):
        top.parse_args(words)
        top.print_help()
        return 0 if words else EXIT_USAGE
    verb = words[0]
    if verb not in _MODULES:
        options = {"version": "--version", "help": "--help"}
        known = f"Type penstock {options[verb]}." if verb in options else nearest(verb, list(VERBS))
        top.error(f"unknown command {verb!r}. {known}")
    __import__(_MODULES[verb])
    module = sys.modules[_module_of(verb)]
    parser = _Parser(
        prog=f"penstock {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(words[1:])
    arguments.debug = debug
    raise_on_interrupt()
    code: int = module.run(arguments)
    return code
