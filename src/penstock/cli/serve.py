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
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.cli.options import MODEL_FIELDS, ModelOptions, add_fields, add_ignore_key, fields_of, options_of
from penstock.cli.streams import complain
from penstock.core import clock, env
from penstock.core.errors import UsageError
from penstock.core.listen import is_loopback, open_socket
from penstock.core.log import set_up
from penstock.core.units import mib
from penstock.engine.config import EngineConfig
from penstock.serve.limits import ServerLimits
from penstock.serve.options import ServerOptions

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.serve.middleware import AccessPolicy
    from penstock.serve.state import AppState


_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, ModelOptions)
    add_fields(parser, ServerOptions, "name", "json", "dry_run", "verbose")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; return the exit code."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise UsageError(
            f"Serving needs packages that are not installed: {', '.join(missing)}",
            fix="Install them with `pip install 'penstock[serve]'`.",
        )
    options, path = options_of(arguments, ServerOptions), options_of(arguments, ModelOptions).path
    options = replace(options, name=options.name or path.resolve().name)
    rules, config = rules_of(options), engine_config_of(arguments, options)
    limits = ServerLimits(deadline_s=options.deadline_s or None, **fields_of(arguments, ServerLimits))
    set_up(verbose=options.verbose)
    if options.dry_run:
        return _dry_run(path, config, options)
    env.raise_descriptor_limit()
    from penstock.engine.llm import LLM  # torch, which a help text does without
    from penstock.engine.model_runner.open import open_config
    from penstock.serve.app import build_service
    from penstock.serve.state import API_SAMPLING

    with open_socket(options.host, options.port) as sock, LLM(path, config) as llm:
        service = build_service(
            llm,
            name=options.name,
            adapters=config.adapters,
            limits=limits,
            created=int(clock.unix_seconds()),
            sampling=API_SAMPLING if options.api_sampling else llm.default_sampling,
            splits_reasoning=options.split_reasoning,
            ignored_keys=open_config(
                path, step=config.checkpoint, ignored_keys=config.ignored_keys
            ).ignored_keys,
        )
        started = _started(llm, service, config, host=options.host, port=sock.getsockname()[1])
        return _serve(service, rules, started, options, sock)


def _dry_run(path: Path, config: EngineConfig, options: ServerOptions) -> int:
    """Print what the engine would be."""
    from penstock.engine.model_runner.open import open_config  # torch, which a help text does without
    from penstock.engine.workers.dry_run import planned_engine

    model = open_config(path, ignored_keys=config.ignored_keys)
    planned = planned_engine(model, config)
    if options.json:
        print(json.dumps({"model": options.name, **planned.as_json()}))
    else:
        print(f"{'model':<16}{options.name}")
        print("\n".join(planned.as_lines()))
    return 0


def _serve(
    service: "AppState",
    rules: "AccessPolicy",
    started: dict[str, Any],
    options: ServerOptions,
    sock: socket.socket,
) -> int:
    from penstock.serve.app import build_app
    from penstock.serve.server import run as run_server

    try:
        failure = run_server(
            build_app(service, rules),
            service,
            sock=sock,
            drain_s=options.drain_s,
            idle_s=options.idle_s or None,
            on_started=lambda: _say_started(started, as_json=options.json),
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
    add_fields(
        parser.add_argument_group("access"), ServerOptions, "host", "port", "api_keys", "insecure", "cors"
    )
    engine = parser.add_argument_group("engine")
    add_fields(engine, EngineConfig, "checkpoint", *MODEL_FIELDS, "compile", "tensor_parallel")
    add_ignore_key(engine)
    add_fields(engine, ServerOptions, "adapter")
    add_fields(
        engine,
        EngineConfig,
        *("max_sequences", "tokens_per_step", "target_itl_ms", "cache_gib", "prefix_caching"),
        "batch_invariant",
    )
    requests = parser.add_argument_group("requests")
    add_fields(requests, ServerOptions, "api_sampling", "split_reasoning")
    add_fields(requests, EngineConfig, "trust_contents")
    limits = parser.add_argument_group("limits")
    add_fields(limits, ServerLimits, "max_open", "max_output_tokens", "max_body_bytes")
    add_fields(limits, ServerOptions, deadline_s="--deadline-s", drain_s="--drain-s", idle_s="--idle-s")


def rules_of(options: ServerOptions) -> "AccessPolicy":
    """Return who may send requests.

    Raises:
        UsageError: everyone of a network could.
    """
    from penstock.core.api_keys import read_keys, single_key
    from penstock.serve.middleware import AccessPolicy

    keys = None if options.api_keys is None else read_keys(options.api_keys)
    if keys is None and (key := env.api_key()) is not None:
        keys = single_key(key)
    if keys is None and not is_loopback(options.host) and not options.insecure:
        raise UsageError(
            f"--host {options.host} opens the server to other machines, and there is no API key",
            fix="Give --api-keys FILE or set PENSTOCK_API_KEY; or --insecure, if a proxy in front of the "
            "server controls access.",
        )
    return AccessPolicy(keys=keys, origins=frozenset(map(_origin, options.cors)), host=options.host)


def _origin(given: str) -> str:
    """Return an origin as browsers write it; another text would never be one."""
    parts = urlsplit(origin := given.rstrip("/").lower())
    if origin not in ("*", "null") and (not parts.scheme or origin != f"{parts.scheme}://{parts.netloc}"):
        fix = "Write scheme and host, such as https://chat.example.com or http://localhost:3000."
        raise UsageError("--cors is no origin of web pages", got=given, fix=fix)
    return origin


def engine_config_of(arguments: argparse.Namespace, options: ServerOptions) -> EngineConfig:
    """Return how the engine is built.

    Raises:
        UsageError: an adapter has no name, or that of the model or of another adapter.
    """
    adapters: dict[str, Path] = {}
    for given in options.adapter:
        adapter, mark, folder = given.partition("=")
        if not adapter or not mark or adapter in (options.name, *adapters):
            raise UsageError(
                "--adapter is NAME=FOLDER, with a name that neither the model has nor another adapter",
                got=given,
                fix="Requests choose by it. --name calls the model something else.",
            )
        adapters[adapter] = Path(folder)
    return EngineConfig(adapters=adapters, **fields_of(arguments, EngineConfig))
