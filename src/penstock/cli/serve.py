"""Serve a trained model over HTTP, with the API of OpenAI.

PATH is a run, one of its checkpoints, or a Hugging Face folder. The server listens on this machine only;
--host 0.0.0.0 opens it to others and needs --api-keys. A chat page is at /, the API's document at
/openapi.json, metrics for Prometheus at /metrics. docs/how-to/serve.md says more.

example:
  penstock serve runs/first
  penstock serve runs/first --checkpoint 1200
  penstock serve ./Llama-3.2-1B-Instruct --weights int8 --host 0.0.0.0 --api-keys keys.txt

exit codes: 0 ended by SIGTERM or Ctrl-C, 1 the engine failed or a second signal came, 2 wrong usage
"""

import argparse
import json
import os
import socket
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.cli.options import MODEL_FIELDS, add_fields, add_ignore_key, fields_of
from penstock.cli.streams import complain
from penstock.core import clock, env
from penstock.core.checks import check_seconds
from penstock.core.errors import UsageError
from penstock.core.listen import is_loopback, open_socket
from penstock.core.log import set_up
from penstock.core.units import mib
from penstock.engine.config import EngineConfig
from penstock.serve.limits import ServerLimits

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.serve.middleware import AccessPolicy
    from penstock.serve.state import AppState


_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", type=Path, metavar="PATH", help="run, checkpoint or Hugging Face folder")
    parser.add_argument("--name", metavar="TEXT", help="name of the model in requests; default: PATH's name")
    parser.add_argument("--json", action="store_true", help="print one JSON line when ready; no other output")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the options and print what the engine would be; load no weights, serve nothing",
    )
    parser.add_argument("--verbose", action="store_true", help="log each request (never its text)")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; return the exit code."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise UsageError(
            f"Serving needs packages that are not installed: {', '.join(missing)}",
            fix="Install them with `pip install 'penstock[serve]'`.",
        )
    rules, config, limits = rules_of(arguments), engine_config_of(arguments), limits_of(arguments)
    set_up(verbose=arguments.verbose)
    if arguments.dry_run:
        return _dry_run(arguments, config)
    env.raise_descriptor_limit()
    from penstock.engine.llm import LLM  # torch, which a help text does without
    from penstock.engine.model_runner.open import open_config
    from penstock.serve.app import build_service
    from penstock.serve.state import API_SAMPLING

    with open_socket(arguments.host, arguments.port) as sock, LLM(arguments.path, config) as llm:
        service = build_service(
            llm,
            name=name_of(arguments),
            adapters=config.adapters,
            limits=limits,
            created=int(clock.unix_seconds()),
            sampling=API_SAMPLING if arguments.api_sampling else llm.default_sampling,
            splits_reasoning=arguments.split_reasoning,
            ignored_keys=open_config(
                arguments.path, step=config.checkpoint, ignored_keys=config.ignored_keys
            ).ignored_keys,
        )
        started = _started(llm, service, config, host=arguments.host, port=sock.getsockname()[1])
        return _serve(service, rules, started, arguments=arguments, sock=sock)


def _dry_run(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Print what the engine would be."""
    from penstock.engine.model_runner.open import open_config  # torch, which a help text does without
    from penstock.engine.workers.dry_run import planned_engine

    model = open_config(arguments.path, ignored_keys=config.ignored_keys)
    planned = planned_engine(model, config)
    if arguments.json:
        print(json.dumps({"model": name_of(arguments), **planned.as_json()}))
    else:
        print(f"{'model':<16}{name_of(arguments)}")
        print("\n".join(planned.as_lines()))
    return 0


def _serve(
    service: "AppState",
    rules: "AccessPolicy",
    started: dict[str, Any],
    *,
    arguments: argparse.Namespace,
    sock: socket.socket,
) -> int:
    from penstock.serve.app import build_app
    from penstock.serve.server import run as run_server

    try:
        failure = run_server(
            build_app(service, rules),
            service,
            sock=sock,
            drain_s=arguments.drain_s,
            idle_s=arguments.idle_s or None,
            on_started=lambda: _say_started(started, as_json=arguments.json),
        )
    finally:
        service.close()
    if failure is not None:
        complain(failure)
    return 0 if failure is None else 1


def _started(
    llm: "LLM", service: "AppState", config: "EngineConfig", *, host: str, port: int
) -> dict[str, Any]:  # Any: JSON
    """Return what was chosen and computed, for people and scripts."""
    capacity, served, recorded = llm.capacity, service.served, llm.thread.engine.runner.recorded
    return {
        "url": f"http://{f'[{host}]' if ':' in host else host}:{port}",
        "port": port,
        "pid": os.getpid(),
        "model": served.name,
        "adapters": list(served.adapters),
        "ignored_keys": list(served.ignored_keys),
        "weights": config.weights,
        "cache": config.cache,
        "tensor_parallel": config.tensor_parallel,
        "drafts": config.drafts,
        "kernels": dict(llm.kernels),
        "context": capacity.context,
        "cache_blocks": capacity.num_blocks,
        "block_size": capacity.block_size,
        "cache_tokens": capacity.num_blocks * capacity.block_size,
        "tokens_per_step": capacity.tokens_per_step,
        "max_sequences": capacity.max_sequences,
        "graphs": None if recorded is None else asdict(recorded),
        "temperature": served.sampling.temperature,
        "top_p": served.sampling.top_p,
        "top_k": served.sampling.top_k,
    }


def _say_started(started: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(started), flush=True)
        return
    for name in ("model", "adapters", "ignored_keys", "weights", "tensor_parallel", "drafts"):
        if started[name] not in ([], 1, "off"):
            value = started[name]
            print(f"{name:<16}{', '.join(value) if isinstance(value, list) else value}")
    print(f"{'context':<16}{started['context']:,} tokens")
    rounded = "" if started["cache"] == "auto" else f" of {started['cache']}"
    print(f"{'cache':<16}{started['cache_tokens']:,} tokens in {started['cache_blocks']:,} blocks{rounded}")
    print(f"{'step':<16}{started['tokens_per_step']:,} tokens, {started['max_sequences']:,} answers, at most")
    if (graphs := started["graphs"]) is not None:
        sizes, size = ", ".join(map(str, graphs["sizes"])), mib(graphs["num_bytes"])
        print(f"{'graphs':<16}of {sizes} answers, {size}, recorded in {graphs['seconds']:.1f} s")
    kernels = started["kernels"]
    assert isinstance(kernels, dict)
    for operation, kernel in kernels.items():
        print(f"{operation:<16}{kernel}")
    drawn = ", ".join(
        f"{name} {started[name]}" for name in ("temperature", "top_p", "top_k") if started[name]
    )
    print(f"{'by default':<16}{drawn}")
    print(f"{'chat page':<16}{started['url']}/")
    print(f"{'API':<16}{started['url']}/v1    (Ctrl-C ends)", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them, by what they are about."""
    _add_door_arguments(parser.add_argument_group("access"))
    _add_engine_arguments(parser.add_argument_group("engine"))
    _add_chat_arguments(parser.add_argument_group("requests"))
    _add_limit_arguments(parser.add_argument_group("limits"))


def rules_of(arguments: argparse.Namespace) -> "AccessPolicy":
    """Return who may send requests.

    Raises:
        UsageError: everyone of a network could.
    """
    from penstock.core.api_keys import read_keys, single_key
    from penstock.serve.middleware import AccessPolicy

    keys = None if arguments.api_keys is None else read_keys(arguments.api_keys)
    if keys is None and (key := env.api_key()) is not None:
        keys = single_key(key)
    if keys is None and not is_loopback(arguments.host) and not arguments.insecure:
        raise UsageError(
            f"--host {arguments.host} opens the server to other machines, and there is no API key",
            fix="Give --api-keys FILE or set PENSTOCK_API_KEY; or --insecure, if a proxy in front of the "
            "server controls access.",
        )
    return AccessPolicy(keys=keys, origins=frozenset(map(_origin, arguments.cors)), host=arguments.host)


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
    return EngineConfig(adapters=adapters, **fields_of(arguments, EngineConfig))


def limits_of(arguments: argparse.Namespace) -> ServerLimits:
    """Return what requests may take."""
    for name, what in (("drain_s", "at once"), ("deadline_s", "none"), ("idle_s", "it stays")):
        check_seconds(f"--{name.replace('_', '-')}", getattr(arguments, name), zero=what)
    return ServerLimits(deadline_s=arguments.deadline_s or None, **fields_of(arguments, ServerLimits))


def _add_door_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s")
    group.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port to listen at; 0: a free one; default: %(default)s",
    )
    group.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="one `name key` a line, keys of 16 characters or more; or PENSTOCK_API_KEY is the key",
    )
    group.add_argument(
        "--insecure", action="store_true", help="accept requests of other machines without a key"
    )
    group.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="accept requests of web pages of this origin, such as https://chat.example.com; may be repeated",
    )


def _add_chat_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-sampling",
        action="store_true",
        help="sampling settings that a request omits take the API's defaults (temperature 1), whatever the "
        "model's generation_config.json recommends",
    )
    group.add_argument(
        "--split-reasoning",
        action="store_true",
        help="what a model writes between <think> and </think> is a chat's reasoning_content",
    )
    add_fields(group, EngineConfig, "trust_contents")


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    add_fields(group, EngineConfig, "checkpoint", *MODEL_FIELDS, "compile", "tensor_parallel")
    add_ignore_key(group)
    group.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter, which requests name as their model; may be repeated",
    )
    add_fields(
        group,
        EngineConfig,
        *(
            "max_sequences",
            "tokens_per_step",
            "target_itl_ms",
            "cache_gib",
            "prefix_caching",
            "batch_invariant",
        ),
    )


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    add_fields(group, ServerLimits, "max_open", "max_output_tokens", "max_body_bytes")
    group.add_argument(
        "--deadline-s",
        type=float,
        default=600.0,
        metavar="S",
        help="maximum seconds of a request, waiting included; 0: no limit; default: %(default)g",
    )
    group.add_argument(
        "--drain-s",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that answers have to end after SIGTERM; default: %(default)g",
    )
    group.add_argument(
        "--idle-s",
        type=float,
        default=0.0,
        metavar="S",
        help="end after so many seconds without a request; 0: never; default: %(default)g",
    )
