"""Continue a prompt with a trained model; the text appears as it is generated.

PATH is a run, one of its checkpoints, or a Hugging Face folder; docs/reference/models.md has the families.
The same seed, prompt and settings give the same text.

example:
  penstock generate runs/first --prompt "A penstock is"
  echo "A penstock is" | penstock generate runs/first --prompt - --greedy --max-tokens 20
  penstock generate ./Llama-3.2-1B --prompt "Water flows" --temperature 0.7 --seed 3 --json

exit codes: 0 done, 1 no model or a damaged one, or no answer, 2 wrong usage, 130 interrupted
"""

import argparse
import json
import sys

from penstock.cli.options import (
    ModelOptions,
    OutputOptions,
    add_answer_arguments,
    add_fields,
    alone,
    options_of,
    params_of,
)
from penstock.cli.streams import _not_utf8, stream_to_stdout, utf8_text
from penstock.engine.request import OutputDelta, Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, ModelOptions)
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="text to continue; - reads standard input"
    )
    add_answer_arguments(parser)
    add_fields(parser, OutputOptions, more={"json": ", one object when done"})


def run(arguments: argparse.Namespace) -> int:
    """Generate; return the exit code."""
    params_of(arguments)  # refuses wrong values before the model is opened
    prompt = _prompt(arguments.prompt)
    from penstock.engine.llm import LLM  # torch, which a help text and a refusal do without

    with LLM(options_of(arguments, ModelOptions).path, alone(arguments)) as llm:
        request = llm.request(prompt, params_of(arguments, llm.default_sampling))
        pieces = llm.stream(request)
        if options_of(arguments, OutputOptions).json:
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


def _record(prompt: str, request: Request, pieces: list[OutputDelta]) -> dict[str, object]:
    return {
        "prompt": prompt,
        "text": "".join(piece.text for piece in pieces),
        "num_prompt_tokens": len(request.prompt),
        "token_ids": [token for piece in pieces for token in piece.token_ids],
        "finish": pieces[-1].finish,
        "seed": request.sampling.seed,
    }
