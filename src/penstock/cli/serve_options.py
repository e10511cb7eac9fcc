"""The options of `penstock serve`, and what they ask for."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, get_args
from urllib.parse import urlsplit

from penstock.cli.model_options import add_model_options, with_model_options
from penstock.core import env
from penstock.core.errors import UsageError
from penstock.engine.config import Compile, EngineConfig

if TYPE_CHECKING:
    from penstock.serve.gate import Rules
    from penstock.serve.limits import Limits

_ENGINE = EngineConfig()
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them, by what they are about."""
    _add_door_arguments(parser.add_argument_group("who may ask"))
    engine = parser.add_argument_group("engine")
    _add_model_arguments(engine)
    _add_step_arguments(engine)
    _add_chat_arguments(parser.add_argument_group("requests"))
    _add_limit_arguments(parser.add_argument_group("limits"))


def rules_of(arguments: argparse.Namespace) -> "Rules":
    """Return who may ask.

    Raises:
        UsageError: everyone of a network could.
    """
    from penstock.serve.gate import Rules
    from penstock.serve.keys import read_keys, single_key

    keys = None if arguments.api_keys is None else read_keys(arguments.api_keys)
    if keys is None and (key := env.api_key()) is not None:
        keys = single_key(key)
    if keys is None and arguments.host not in _LOOPBACK and not arguments.insecure:
        raise UsageError(
            f"--host {arguments.host} opens the server to other machines, and there is no API key",
            fix="Give --api-keys FILE or set PENSTOCK_API_KEY; or --insecure, if something in front of the "
            "server decides who may ask.",
        )
    return Rules(keys=keys, origins=frozenset(map(_origin, arguments.cors)))


def _origin(given: str) -> str:
    """Return an origin as browsers write it; another text would never be one."""
    parts = urlsplit(origin := given.rstrip("/").lower())
    if origin not in ("*", "null") and (not parts.scheme or origin != f"{parts.scheme}://{parts.netloc}"):
        fix = "Write scheme and host, such as https://chat.example.com or http://localhost:3000."
        raise UsageError("--cors is no origin of web pages", got=given, fix=fix)
    return origin


def name_of(arguments: argparse.Namespace) -> str:
    """Return what requests call the model."""
    name: str = arguments.name or arguments.path.resolve().name
    return name


def engine_config_of(arguments: argparse.Namespace) -> EngineConfig:
    """Return how the engine is built."""
    adapters: dict[str, Path] = {}
    for given in arguments.adapter:
        name, mark, folder = given.partition("=")
        if not name or not mark or name in (name_of(arguments), *adapters):
            raise UsageError(
                "--adapter is NAME=FOLDER, with a name that neither the model has nor another adapter",
                got=given,
                fix="Requests choose by it. --name calls the model something else.",
            )
        adapters[name] = Path(folder)
    own = EngineConfig(
        compile=arguments.compile,
        tensor_parallel=arguments.tensor_parallel,
        max_sequences=arguments.max_sequences,
        tokens_per_step=arguments.tokens_per_step,
        between_tokens_ms=arguments.between_tokens_ms,
        cache_gib=arguments.cache_gib,
        prefix_caching=not arguments.no_prefix_caching,
        trust_contents=arguments.trust_contents,
        adapters=adapters,
    )
    return with_model_options(own, arguments)


def limits_of(arguments: argparse.Namespace) -> "Limits":
    """Return what requests may take."""
    from penstock.serve.limits import Limits

    for name, what in (("drain_s", "at once"), ("deadline_s", "none")):
        if not 0 <= (given := getattr(arguments, name)) < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} must be 0 or more seconds", got=given, fix=f"0 means {what}.")
    return Limits(
        max_body_bytes=arguments.max_body_bytes,
        max_output_tokens=arguments.max_output_tokens,
        max_open=arguments.max_open,
        deadline_s=arguments.deadline_s or None,
    )


def _add_door_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s")
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0: a free one; default: %(default)s"
    )
    group.add_argument(
        "--api-keys", type=Path, metavar="FILE", help="one `name key` a line; or PENSTOCK_API_KEY is the key"
    )
    group.add_argument("--insecure", action="store_true", help="other machines may ask without a key")
    group.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages of this origin may ask, such as https://chat.example.com; may be repeated",
    )


def _add_chat_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-sampling",
        action="store_true",
        help="what requests leave out is as in OpenAI's API (temperature 1), whatever the model's "
        "generation_config.json recommends",
    )
    group.add_argument(
        "--split-reasoning",
        action="store_true",
        help="what a model writes between <think> and </think> is a chat's reasoning_content",
    )
    group.add_argument(
        "--trust-contents",
        action="store_true",
        help="names of special tokens in messages become those tokens, as in transformers; whoever writes a "
        "message, or what a tool returns, can then write any turn",
    )


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    add_model_options(group)
    group.add_argument(
        "--compile",
        choices=get_args(Compile),
        default=_ENGINE.compile,
        help="torch.compile of steps, beside serving; slower on CPUs, untried on GPUs; default: off so far",
    )
    group.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="processes per layer")
    group.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter, which requests name as their model; may be repeated",
    )


def _add_step_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-sequences",
        type=int,
        default=_ENGINE.max_sequences,
        metavar="N",
        help="answers in the making at once; default: %(default)s",
    )
    group.add_argument("--tokens-per-step", type=int, metavar="N", help="at most; default: computed")
    group.add_argument(
        "--between-tokens-ms",
        type=float,
        default=_ENGINE.between_tokens_ms,
        metavar="X",
        help="what a step may last while prompts wait beside answers: less is an evener stream, and later "
        "first tokens; default: %(default)g",
    )
    group.add_argument("--cache-gib", type=float, metavar="X", help="default: computed from free memory")
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="forget prompts when they are answered"
    )


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-open", type=int, default=1024, metavar="N", help="answers made or waiting; then 429"
    )
    group.add_argument(
        "--max-output-tokens", type=int, metavar="N", help="default: what the context has room for"
    )
    group.add_argument(
        "--max-body-bytes", type=int, default=4 << 20, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--deadline-s",
        type=float,
        default=600.0,
        metavar="S",
        help="for a request, waiting included; 0: none; default: %(default)g",
    )
    group.add_argument(
        "--drain-s",
        type=float,
        default=30.0,
        metavar="S",
        help="for answers to end after SIGTERM; default: %(default)g",
    )
