"""C++ operators for CPUs: built once per machine, `torch.ops.penstock.*`; without a compiler, plain torch.

Whoever uses one keeps a plain PyTorch reference beside it and asks `is_available()` first. To add an
operator: a `.cpp` file here that registers itself, its shapes in `fakes.py`, an equality test.
"""

import logging
from functools import cache

import torch

from penstock.nn.native.build import NotBuilt, built_library
from penstock.nn.native.fakes import FAKES

log = logging.getLogger(__name__)


@cache
def is_available() -> bool:
    """Load the operators, building them if need be; say once in the log if it cannot be.

    Building takes some seconds, once per machine: not to be asked first in a request's path.
    """
    try:
        torch.ops.load_library(str(built_library()))  # type: ignore[no-untyped-call]
    except (NotBuilt, OSError) as error:  # the loader of libraries raises OSError
        log.warning("native=off reason=%r effect='plain torch computes instead, slower'", str(error))
        return False
    for name, fake in FAKES.items():
        torch.library.register_fake(f"penstock::{name}", fake)
    return True
