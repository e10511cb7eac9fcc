"""Find the verb, import it, run it; turn errors into one paragraph and an exit code.

A verb is a module with `add_arguments(parser)` and `run(arguments) -> int`. Only the verb that was
asked for is imported, so `penstock --help` loads neither torch nor numpy.
"""

import argparse
import errno
import os
import sys
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from penstock import __version__
from penstock.cli.streams import settle_streams, write_utf8
from penstock.core import clock
from penstock.core.env import ranks, sleep_at_barriers
from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.core.garbage import look_no_more, look_seldom
from penstock.core.table import Table

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

_FIRST_SPEAKS_S = 2.0
"""torchrun gives each rank the same wrong words: the first of a machine says so, before the others end."""

VERBS = {
    "data": "prepare, describe, verify and audit token corpora",
    "recipes": "list, show and check the recipes that come with Penstock",
    "plan": "find the fastest way to train a model on a cluster, and what it takes",
    "train": "train a model from a recipe, on one process or many",
    "islands": "let a running job go on with more or fewer islands",
    "eval": "score a model on text: loss, perplexity, bits per byte",
    "checkpoint": "list the checkpoints of a run, check every byte of them",
    "export": "write a checkpoint as a Hugging Face folder",
    "tune": "train heads that let a model answer faster",
    "generate": "continue a prompt with a trained model",
    "chat": "talk to a trained model",
    "serve": "answer over HTTP, with the API of OpenAI",
    "netlab": "try a recipe on emulated hosts, joined by a network as slow as you say",
    "report": "draw a run as one HTML page",
    "doctor": "examine a machine, or all of a cluster, before a run does",
    "demo": "the whole story on this machine, in under eight minutes",
}

_MODULES = Table("command", {verb: f"penstock.cli.{verb}:__name__" for verb in VERBS})

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
        argv: its words; None: this process was started for the command, with its words.
    """
    if argv is not None:
        return _main(list(argv))
    settle_streams()
    look_seldom()
    try:
        return _main(sys.argv[1:])
    finally:
        look_no_more()


def _main(words: list[str]) -> int:
    debug = "--debug" in words
    sleep_at_barriers()
    write_utf8()
    try:
        try:
            return _dispatch([word for word in words if word != "--debug"], debug=debug)
        finally:
            sys.stdout.flush()  # here, where a reader that left is forgiven
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PenstockError, KeyboardInterrupt, OSError) as error:
        if debug:
            raise
        message, code = explain(error)
        if isinstance(error, UsageError) and ranks().local_rank:
            clock.sleep(_FIRST_SPEAKS_S)
        else:
            complain(message)
        return code


class _Parser(argparse.ArgumentParser):
    def parse_known_args(  # type: ignore[no-untyped-def, override]
        self, args=None, namespace=None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; refuse what is left over here, where a subcommand's own options are known."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            match = get_close_matches(left[0], self._option_string_actions, n=1)
            hint = f". Did you mean {match[0]!r}?" if match else ""
            self.error(f"unrecognized arguments: {' '.join(left)}{hint}")
        return found, left

    def error(self, message: str) -> NoReturn:
        if ranks().local_rank:
            clock.sleep(_FIRST_SPEAKS_S)
            sys.exit(EXIT_USAGE)
        super().error(message)


def complain(message: str) -> None:
    """Print a message on standard error, as one paragraph."""
    print(textwrap.fill(f"penstock: {message}", 100, break_long_words=False), file=sys.stderr)


def explain(error: BaseException) -> tuple[str, int]:
    """Return one paragraph for a person and the exit code for a script."""
    if isinstance(error, PenstockError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted.", EXIT_INTERRUPTED
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        remedy = " Free some space and run the same command again." if error.errno == errno.ENOSPC else ""
        return f"{error.strerror or error}{where}.{remedy}", EXIT_FAILED
    raise error


def _dispatch(words: list[str], *, debug: bool) -> int:
    top = _Parser(
        prog="penstock",
        usage="penstock COMMAND [options]",
        description="Train, tune and serve foundation models on ordinary machines joined by Ethernet.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "".join(f"  {v:<12}{text}\n" for v, text in VERBS.items()) + "\n" + _EPILOG,
    )
    top.add_argument("--version", action="version", version=f"penstock {__version__}")
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if not words or words[0].startswith("-"):
        top.parse_args(words)
        top.print_help()
        return 0 if words else EXIT_USAGE
    verb = words[0]
    if verb not in _MODULES:
        top.error(f"unknown command {verb!r}. {nearest(verb, list(VERBS))}")
    __import__(_MODULES[verb])
    module = sys.modules[f"penstock.cli.{verb}"]
    parser = _Parser(
        prog=f"penstock {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(words[1:])
    arguments.debug = debug
    code: int = module.run(arguments)
    return code
