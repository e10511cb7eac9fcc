"""Options of every command whose model answers: what it is computed on and in, and what guesses ahead."""

import argparse
from dataclasses import replace
from typing import get_args

from penstock.engine.config import Cache, EngineConfig, Weights

_DEFAULT = EngineConfig()


def add_model_options(group: argparse._ArgumentGroup) -> None:
    """Declare them."""
    group.add_argument("--device", help="default: the first GPU if there is one, else the CPU")
    group.add_argument(
        "--weights",
        choices=get_args(Weights),
        default=_DEFAULT.weights,
        help="what matrices are computed in; default: %(default)s",
    )
    group.add_argument(
        "--cache",
        choices=get_args(Cache),
        default=_DEFAULT.cache,
        help="what keys and values are kept in; default: as they are computed",
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="tokens of prompt and answer at most; default: the model's context",
    )
    group.add_argument(
        "--drafts",
        default=_DEFAULT.drafts,
        metavar="WHAT",
        help="guess tokens ahead, for the same answer sooner: off, ngram, or a folder with a draft model or "
        "speculator",
    )
    group.add_argument(
        "--num-drafts",
        type=int,
        default=_DEFAULT.num_drafts,
        metavar="N",
        help="guessed tokens a step, at most; default: %(default)s",
    )


def with_model_options(config: EngineConfig, arguments: argparse.Namespace) -> EngineConfig:
    """Return an engine's settings with those that `add_model_options` declared."""
    return replace(
        config,
        device=arguments.device,
        weights=arguments.weights,
        cache=arguments.cache,
        max_context=arguments.max_context,
        drafts=arguments.drafts,
        num_drafts=arguments.num_drafts,
    )
