"""Serve a trained model over HTTP, with the API of OpenAI.

PATH is a run, one of its checkpoints, or a Hugging Face folder. The server listens on this machine only;
--host 0.0.0.0 opens it to others and needs --api-keys. A chat page is at /, the API's document at
/openapi.json, metrics for Prometheus at /metrics. docs/serving.md says more.

example:
  penstock serve runs/first
  penstock serve ./Llama-3.2-1B-Instruct --weights int8 --host 0.0.0.0 --api-keys keys.txt
"""

import argparse
import json
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.serve_options import add_options, engine_config_of, limits_of, name_of, rules_of
from penstock.core import clock, env
from penstock.core.errors import UsageError
from penstock.core.log import set_up

if TYPE_CHECKING:
    from penstock.engine.config import EngineConfig
    from penstock.engine.llm import LLM
    from penstock.serve.gate import Rules
    from penstock.serve.served import Service

_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", type=Path, metavar="PATH", help="run, checkpoint or Hugging Face folder")
    parser.add_argument("--name", metavar="TEXT", help="what requests call the model; default: PATH's name")
    parser.add_argument("--json", action="store_true", help="print one JSON line when ready; no other output")
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
    env.raise_descriptor_limit()
    from penstock.engine.llm import LLM  # torch, which a help text does without
    from penstock.serve.app import build_service
    from penstock.serve.run import open_socket
    from penstock.serve.served import API_SAMPLING, recommended_sampling

    with open_socket(arguments.host, arguments.port) as sock, LLM(arguments.path, config) as llm:
        service = build_service(
            llm,
            name=name_of(arguments),
            adapters=config.adapters,
            limits=limits,
            created=int(clock.unix_seconds()),
            sampling=API_SAMPLING if arguments.api_sampling else recommended_sampling(llm.words),
            splits_reasoning=arguments.split_reasoning,
        )
        started = _started(llm, service, config, host=arguments.host, port=sock.getsockname()[1])
        return _serve(service, rules, started, arguments=arguments, sock=sock)


def _serve(
    service: "Service",
    rules: "Rules",
    started: dict[str, object],
    *,
    arguments: argparse.Namespace,
    sock: socket.socket,
) -> int:
    from penstock.serve.app import build_app
    from penstock.serve.run import run as run_server

    try:
        failure = run_server(
            build_app(service, rules),
            service,
            sock=sock,
            drain_s=arguments.drain_s,
            on_started=lambda: _say_started(started, as_json=arguments.json),
        )
    finally:
        service.templates.close()
    if failure is not None:
        print(f"penstock: {failure}", file=sys.stderr)
    return 0 if failure is None else 1


def _started(
    llm: "LLM", service: "Service", config: "EngineConfig", *, host: str, port: int
) -> dict[str, object]:
    """Return what was chosen and computed, for people and scripts."""
    capacity, served = llm.capacity, service.served
    return {
        "url": f"http://{f'[{host}]' if ':' in host else host}:{port}",
        "port": port,
        "pid": os.getpid(),
        "model": served.name,
        "adapters": list(served.adapters),
        "weights": config.weights,
        "cache": config.cache,
        "tensor_parallel": config.tensor_parallel,
        "drafts": config.drafts,
        "context": capacity.context,
        "cache_blocks": capacity.num_blocks,
        "block_size": capacity.block_size,
        "cache_tokens": capacity.num_blocks * capacity.block_size,
        "tokens_per_step": capacity.tokens_per_step,
        "max_sequences": capacity.max_sequences,
        "temperature": served.sampling.temperature,
        "top_p": served.sampling.top_p,
        "top_k": served.sampling.top_k,
    }


def _say_started(started: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(started), flush=True)
        return
    for name in ("model", "adapters", "weights", "tensor_parallel", "drafts"):
        if started[name] not in ([], 1, "off"):
            value = started[name]
            print(f"{name:<16}{', '.join(value) if isinstance(value, list) else value}")
    print(f"{'context':<16}{started['context']:,} tokens")
    rounded = "" if started["cache"] == "auto" else f" of {started['cache']}"
    print(f"{'cache':<16}{started['cache_tokens']:,} tokens in {started['cache_blocks']:,} blocks{rounded}")
    print(f"{'step':<16}{started['tokens_per_step']:,} tokens, {started['max_sequences']:,} answers, at most")
    drawn = ", ".join(
        f"{name} {started[name]}" for name in ("temperature", "top_p", "top_k") if started[name]
    )
    print(f"{'by default':<16}{drawn}")
    print(f"{'chat page':<16}{started['url']}/")
    print(f"{'API':<16}{started['url']}/v1    (Ctrl-C ends)", flush=True)
