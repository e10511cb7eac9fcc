"""What ptxas made of our Triton kernels for the device, at the GPU kit's shapes: spills, narrow loads.

The kernels are those that Penstock launches when it computes what `benchmarks/gpu_parts/kernels.py` measures.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import triton
from gpu_parts.kernels import OURS, Kernels
from gpu_parts.part import Part
from torch import nn
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from penstock.nn.kernels.paged import LayerPages, by_triton
from penstock.nn.linear.quantized import FEW_TOKENS, Int4Linear
from tools.null_gpu.sass import findings, instructions_of

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TOKENS = (1, 64)
SEQUENCES, MANY = 64, 2 * FEW_TOKENS[-1]


def launch_ours(
    _: str, ways: Mapping[str, Callable[[], Sequence[Callable[[], object]]]], **__: object
) -> None:
    """Launch our way of a comparison once, instead of timing all of them."""
    ways[OURS]()[0]()


def ours() -> Iterator[tuple[str, CompiledKernel]]:
    """Yield the kernels of Penstock that were compiled, by their names."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("penstock"):
            continue
        for function in vars(module).values():
            if isinstance(function, JITFunction) and function.fn.__module__ == name:
                for kernels, *_ in function.device_caches.values():
                    yield from ((function.fn.__name__.lstrip("_"), kernel) for kernel in kernels.values())


def about(kernel: CompiledKernel) -> dict[str, int]:
    """Return what the machine code of a kernel shows."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        sass = subprocess.run(
            [CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = findings(instructions_of(sass))
    return {
        "spills": found.spills,
        "narrow_loads": found.narrow_loads,
        "shared_bytes": kernel.metadata.shared,
    }


def prompt_by_triton(launched: Kernels, dtype: torch.dtype) -> None:
    """Launch the kernel of prompts that are not gathered."""
    q, keys, values, step = launched._pages(1, 2048, dtype=dtype, new=2048)
    by_triton(q, keys, values, step, window=None, scale=launched.dim**-0.5)


def keys_of_a_step(launched: Kernels) -> None:
    """Launch the kernel that writes a step's keys and values to their pages."""
    _, keys, values, step = launched._pages(SEQUENCES, 2048, dtype=torch.bfloat16)
    k, v = (launched.normal(1, launched.kv_heads, SEQUENCES, launched.dim) for _ in range(2))
    LayerPages(keys, values, step).append(k, v)


def many_tokens_times_int4(launched: Kernels) -> None:
    """Launch the kernel that writes a matrix of 4 bits out, for more tokens than products of few have."""
    made = nn.Linear(launched.hidden, launched.wide, bias=False, device=launched.device, dtype=torch.bfloat16)
    Int4Linear(made.requires_grad_(False))(launched.normal(MANY, launched.hidden))


def main() -> None:
    """Print name of a kernel and number of its variant -> what its code shows."""
    device = torch.device("cuda:0")
    found: dict[str, dict[str, int]] = {}
    seen: set[int] = set()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        launched = Kernels(Part("kernels", device, False, 600.0, Path(folder) / "kernels.json"))
        launched.compare = launch_ours
        works = {
            f"pages, {n} x {length} tokens": partial(launched.decode, n, length)
            for n, length in launched.contexts
        }
        works["pages, a prompt"] = launched.prompt_over_pages
        for bits, dtype in (("16 bits", torch.bfloat16), ("8 bits", torch.int8)):
            works[f"pages of {bits}, a prompt by Triton"] = partial(prompt_by_triton, launched, dtype)
        works[f"pages, keys of {SEQUENCES} tokens"] = partial(keys_of_a_step, launched)
        works[f"int4, {MANY} tokens"] = partial(many_tokens_times_int4, launched)
        for tokens in TOKENS:
            works[f"draws, {tokens} rows"] = partial(launched.sampling, tokens)
            for bits in ("int8", "int4", "float8"):
                works[f"{bits}, {tokens} tokens"] = partial(launched.product, bits, tokens)
        for what, work in works.items():
            work()
            for name, kernel in ours():
                if id(kernel) not in seen:
                    seen.add(id(kernel))
                    same = sum(one.startswith(f"kernel {name}, {what}") for one in found)
                    found[f"kernel {name}, {what}" + (f", {same + 1}" if same else "")] = about(kernel)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
