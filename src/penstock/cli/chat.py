"""Talk to a trained model.

PATH is a run, one of its checkpoints, or a Hugging Face folder; the folder's chat template is used if
it has one. A model that was never tuned on conversations will ramble.

/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer.

example:
  penstock chat ./Llama-3.2-1B-Instruct --system "Answer in one sentence."

exit codes: 0 left, 1 no model or a damaged one, 2 wrong usage, or no message could be answered
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.cli.options import (
    ModelOptions,
    add_answer_arguments,
    add_fields,
    alone,
    options_of,
    params_of,
)
from penstock.cli.streams import EXIT_USAGE, stream_to_stdout, utf8_text
from penstock.core.errors import UsageError
from penstock.engine.request import OutputDelta
from penstock.engine.sampling_params import Params

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.text.chat_template import Message

with contextlib.suppress(ImportError):  # not on Windows
    import readline  # noqa: F401, because importing it gives `input` arrow keys and history


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, ModelOptions)
    parser.add_argument("--system", metavar="TEXT", help="instruction before the conversation")
    add_answer_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Converse until the user leaves; return the exit code."""
    params_of(arguments)  # refuses wrong values before the model is opened
    if isinstance(sys.stdin, io.TextIOWrapper):  # not where a test or notebook has replaced it
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    system = utf8_text(arguments.system or "", name="--system")
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    path = options_of(arguments, ModelOptions).path
    from penstock.engine.llm import LLM  # torch, which a help text and a refusal do without

    with LLM(path, alone(arguments)) as llm:
        llm.thread.engine.check_generates()
        if sys.stdin.isatty():
            name = path.resolve().name
            print(
                f"Talking to {name} ({path}), {llm.capacity.context:,} tokens at most. "
                "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer."
            )
        return _converse(llm, start, params_of(arguments, llm.default_sampling))


def _converse(llm: "LLM", start: list["Message"], params: Params) -> int:
    """Answer lines until the user leaves; return the exit code."""
    history = list(start)
    num_messages = num_answered = 0
    while (line := _read_line()) not in (None, "/quit"):
        if line == "/reset":
            history = list(start)
            print("(the conversation is forgotten)")
        elif line.startswith("/"):
            print(f"(no command {line!r}; there are /reset and /quit)")
        elif line:
            before, history = history, _turn(llm, history, line, params)
            num_messages += 1
            num_answered += history is not before
    return EXIT_USAGE if num_messages and not num_answered else 0


def _turn(llm: "LLM", history: list["Message"], line: str, params: Params) -> list["Message"]:
    """Answer one line; return the history, unchanged if there could be no answer."""
    asked: list[Message] = [*history, {"role": "user", "content": line}]
    try:
        pieces = llm.stream(llm.chat_request(asked, params))
    except UsageError as error:  # the context is full, or the template refuses: not the end of the program
        print(f"({error} /reset starts afresh.)", file=sys.stderr)
        return history
    return [*asked, {"role": "assistant", "content": _answer(pieces)}]


def _answer(pieces: Iterator[OutputDelta]) -> str:
    heard: list[OutputDelta] = []

    def noted() -> Iterator[OutputDelta]:
        for piece in pieces:
            heard.append(piece)
            yield piece

    try:
        stream_to_stdout(noted())
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    print()
    return "".join(piece.text for piece in heard)


def _read_line() -> str | None:
    """Return the next line, or None at the end of input; Ctrl-C drops what was typed.

    Raises:
        UsageError: a line that is not UTF-8 came through a pipe; on a terminal it is dropped.
    """
    while True:
        try:
            return utf8_text(input("> " if sys.stdin.isatty() else ""), name="The line").strip()
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
        except UsageError as error:
            if not sys.stdin.isatty():
                raise
            print(f"({error})", file=sys.stderr)
