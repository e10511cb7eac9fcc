"""C++ operators for CPUs, `torch.ops.penstock.*`: one library, built once per machine (core/native_build.py).

Until it is built, and without a compiler, plain torch runs. A caller keeps a plain PyTorch reference beside
each operator and checks `is_available()` first. To add an operator: a `.cpp` file here that registers itself,
its result shape in `FAKES`, an equality test.

The loops know pointers and sizes only. The slow ones are units of their own, which compile side by side.
All files that see tensors are one more unit, because torch's headers cost the compiler more than each of
those files. The library links no OpenMP: threads come from torch's own pool through its C interface
(`threads.h`), because two pools would compete for the cores.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from penstock.core import env
from penstock.core.log import EventLog
from penstock.core.native_build import (
    BeingBuilt,
    NotBuilt,
    Unit,
    find_compiler,
    library_if_built,
    library_of,
)

log = EventLog(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
LOOPS = ("attention/bfloat16.cpp", "attention/float.cpp", "product.cpp")
"""Units that include nothing of torch's."""


@cache
def is_available() -> bool:
    """Load the operators; if they are not built yet, a process of its own builds them for the next start.

    The answer is that of this process's first call: a process never changes its kernels. If it is no, a
    warning says why.
    """
    try:
        torch.ops.load_library(str(built_library()))  # type: ignore[no-untyped-call]
    except BeingBuilt as error:
        log.warning(
            "operators_building",
            "{reason:sentence}. Until then plain PyTorch computes, slower; the next start has the operators",
            reason=str(error).removesuffix("."),
        )
        return False
    except (NotBuilt, OSError) as error:  # OSError: the dynamic loader
        log.warning(
            "operators_missing",
            "The C++ operators are not used, plain PyTorch computes instead, slower: {reason}",
            reason=error,
        )
        return False
    for name, fake in FAKES.items():
        torch.library.register_fake(f"penstock::{name}", fake)
    return True


def built_library() -> Path:
    """Return the path of this machine's library; another process builds it if it is missing.

    Raises:
        BeingBuilt: it is not there yet; with PENSTOCK_NATIVE=wait, this waits for it instead.
        NotBuilt: there is no compiler, it failed, or there is no safe folder to write to.
    """
    return library_of(unit()) if env.waits_for_operators() else library_if_built(unit())


def unit() -> Unit:
    """Return the translation units of all operators."""
    root = Path(torch.__file__).parent
    return Unit(
        name="operators",
        title="the C++ operators",
        takes="once a machine, for half a minute on two idle cores",
        module="penstock.nn.native",
        texts=[_unit_of(_sources_of_tensors()), *(_unit_of([source]) for source in LOOPS)],
        suffix=".cpp",
        sources=_sources(),
        find_compiler=_compiler,
        variable="CXX",
        flags=FLAGS,
        paths=[f"-I{root / 'include'}", f"-L{root / 'lib'}"],
        links=["-ltorch_cpu", "-lc10"],
        version=torch.__version__,
    )


def _unit_of(names: Sequence[str]) -> str:
    return "".join(f'#include "{name}"\n' for name in names)


def _sources_of_tensors() -> list[str]:
    names = [file.relative_to(SOURCES).as_posix() for file in _sources() if file.suffix == ".cpp"]
    return [name for name in names if name not in LOOPS]


def _compiler() -> str:
    return find_compiler("C++", "CXX", ["g++", "clang++", "c++"])


def _sources() -> list[Path]:
    """Return all files, those of this folder first: its path is the one that the compiler includes from."""
    found = (file for pattern in ("*.cpp", "*.h") for file in SOURCES.rglob(pattern))
    return sorted(found, key=lambda file: (len(file.parts), file.name))


def _rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _add_rms_norm(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _paged_attention(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


def _rotate_and_store(qkv: Tensor, *rest: Tensor) -> Tensor:
    cosines, _, _, keys, *_ = rest  # cosines, sines, slots, keys, values, norms
    kv_heads, head_dim = keys.shape[1], cosines.shape[-1]  # pages of 8 bits are wider
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim)


def _activate(gate_up: Tensor, activation: int, is_gated: bool) -> Tensor:  # noqa: ARG001
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // (2 if is_gated else 1))


def _linear(x: Tensor, *matrix_and_outputs: Tensor | int | None) -> Tensor:
    outputs = matrix_and_outputs[-1]
    assert isinstance(outputs, int), outputs
    return x.new_empty(*x.shape[:-1], outputs)


def _decoder_block(*_: object) -> None:
    pass


def _draw(logits: Tensor, settings: Tensor | None) -> Tensor:  # noqa: ARG001
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


FAKES: dict[str, Callable[..., Tensor | None]] = {
    "linear": _linear,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "paged_attention": _paged_attention,
    "decoder_block": _decoder_block,
    "rotate_and_store": _rotate_and_store,
    "activate": _activate,
    "draw": _draw,
}
"""Operator -> function that returns an empty result of the right shape, for `torch.compile`."""
