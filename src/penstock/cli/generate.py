"""Continue a prompt with a trained model; the text appears as it is generated.

PATH is a run, one of its checkpoints, or a Hugging Face folder of a Llama, Granite, Mistral or Qwen
model.
The same seed, prompt and settings give the same text.

example:
  penstock generate runs/first --prompt "A penstock is"
  echo "A penstock is" | penstock generate runs/first --prompt - --greedy --max-tokens 20
  penstock generate ./Llama-3.2-1B --prompt "Water flows" --temperature 0.7 --seed 3 --json
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.cli.model_options import add_model_options, with_model_options
from penstock.core.errors import UsageError
from penstock.engine.config import EngineConfig
from penstock.engine.params import Params
from penstock.engine.request import Piece, Request
from penstock.engine.sampling import Sampling

_DEFAULT = Sampling()
_ADAPTER = "adapter"
"""What requests call the one there may be."""

_SHAPING = (
    ("min_p", "P", "draw among tokens at least P times as probable as the likeliest"),
    ("repetition_penalty", "R", "above 1: tokens of prompt and answer become less likely"),
    ("presence_penalty", "X", "taken from the logit of each token in the answer"),
    ("frequency_penalty", "X", "taken from it for every time the token is there"),
    ("min_tokens", "N", "do not end before N tokens"),
)
"""Settings of `Sampling` that are options: name, what to give, and what it does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", type=Path, metavar="PATH", help="run, checkpoint or Hugging Face folder")
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="text to continue; - reads standard input"
    )
    add_answer_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object when done")


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how tokens are drawn, and by what engine."""
    parser.add_argument("--max-tokens", type=int, metavar="N", help="at most N tokens; default: all that fit")
    drawn = parser.add_mutually_exclusive_group()
    drawn.add_argument(
        "--temperature", type=float, default=_DEFAULT.temperature, metavar="T", help="default: %(default)s"
    )
    drawn.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest; default: all")
    parser.add_argument(
        "--top-p",
        type=float,
        default=_DEFAULT.top_p,
        metavar="P",
        help="draw among the fewest tokens whose probabilities reach P; default: %(default)s",
    )
    for name, metavar, effect in _SHAPING:
        default = getattr(_DEFAULT, name)
        option = f"--{name.replace('_', '-')}"
        text = f"{effect}; default: %(default)s"
        parser.add_argument(option, type=type(default), default=default, metavar=metavar, help=text)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    parser.add_argument("--seed", type=int, default=_DEFAULT.seed, metavar="N", help="default: %(default)s")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--adapter", type=Path, metavar="FOLDER", help="a LoRA adapter of this model")
    add_model_options(engine)


def params_of(arguments: argparse.Namespace) -> Params:
    """Return the settings that `add_answer_arguments` declared of them."""
    sampling = Sampling(
        temperature=0.0 if arguments.greedy else arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        **{name: getattr(arguments, name) for name, _, _ in _SHAPING},
    )
    stops = tuple(utf8_text(text, name="--stop") for text in arguments.stop)
    adapter = None if arguments.adapter is None else _ADAPTER
    return Params(sampling=sampling, max_tokens=arguments.max_tokens, stop_texts=stops, adapter=adapter)


def alone(arguments: argparse.Namespace) -> EngineConfig:
    """Return an engine for one person: room for one answer."""
    adapters = {} if arguments.adapter is None else {_ADAPTER: arguments.adapter}
    return with_model_options(EngineConfig(max_sequences=1, adapters=adapters), arguments)


def run(arguments: argparse.Namespace) -> int:
    """Generate; return the exit code."""
    params = params_of(arguments)
    prompt = _prompt(arguments.prompt)
    from penstock.engine.llm import LLM  # torch, which a help text and a refusal do without

    with LLM(arguments.path, alone(arguments)) as llm:
        request = llm.request(prompt, params)
        pieces = llm.stream(request)
        if arguments.json:
            record = _record(prompt, request, list(pieces))
            print(json.dumps(record, ensure_ascii=False))
        else:
            stream_to_stdout(pieces)
            print()
    return 0


def _prompt(given: str) -> str:
    if given != "-":
        return utf8_text(given, name="--prompt")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")  # which `echo` adds
    except UnicodeDecodeError as error:
        raise _not_utf8("Standard input", error) from None


def utf8_text(text: str, *, name: str) -> str:
    """Return what the system handed over as text; bytes that the locale could not decode are UTF-8.

    Args:
        name: of where it came from, for the message.

    Raises:
        UsageError: those bytes are not UTF-8.

    >>> utf8_text("caf\\udcc3\\udca9", name="The line")
    'café'
    """
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair stands for each byte that was not decoded
        try:
            return text.encode(errors="surrogateescape").decode()
        except UnicodeError as error:
            raise _not_utf8(name, error) from None
    return text


def _not_utf8(name: str, error: UnicodeError) -> UsageError:
    where = f" at byte {error.start}" if isinstance(error, UnicodeDecodeError) else ""
    return UsageError(f"{name} is not UTF-8 text{where}", fix="Convert it, with iconv for example.")


def _record(prompt: str, request: Request, pieces: list[Piece]) -> dict[str, object]:
    return {
        "prompt": prompt,
        "text": "".join(piece.text for piece in pieces),
        "num_prompt_tokens": len(request.prompt),
        "token_ids": [token for piece in pieces for token in piece.token_ids],
        "finish": pieces[-1].finish,
        "seed": request.sampling.seed,
    }


def stream_to_stdout(pieces: Iterator[Piece]) -> str:
    """Print pieces as they come; return the whole text.

    On a terminal, control characters other than newline and tab are shown as U+FFFD: a model can
    write the sequences that move the cursor or rename the window. A pipe gets the text as it is.
    """
    whole = []
    is_terminal = sys.stdout.isatty()
    for piece in pieces:
        whole.append(piece.text)
        sys.stdout.write(_harmless(piece.text) if is_terminal else piece.text)
        sys.stdout.flush()
    return "".join(whole)


def _harmless(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
