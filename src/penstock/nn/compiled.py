"""Functions over large tensors as few fused kernels, by torch.compile."""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

from penstock.core.log import EventLog

P = ParamSpec("P")
R = TypeVar("R")

log = EventLog(__name__)

_MAX_PROGRAMS = 64
"""Shapes of one function. torch's limit is 8; beyond it the function would run plain without a word."""


@cache
def fused(function: Callable[P, R], otherwise: Callable[P, R]) -> Callable[P, R]:
    """Return the function, compiled by torch.compile: one program for each of its shapes.

    If it does not compile, `otherwise` runs from then on, with a warning.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_PROGRAMS)
    program = torch.compile(function, dynamic=False, fullgraph=True)
    fails = False

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> R:
        nonlocal fails
        if not fails:
            try:
                return program(*args, **options)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
                fails = True
                log.warning(
                    "compile_failed",
                    "{function} does not compile: {error}",
                    function=function.__qualname__,
                    error=str(error).partition("\n")[0],
                )
        return otherwise(*args, **options)

    return run
