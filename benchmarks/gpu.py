"""Prove a GPU: what is computed on it is right, how fast it is, and whether the planner foretold that.

Five parts run one after another, the most important first, each in a process of its own and for its share
of nine minutes; what one leaves goes to the next, and one that hangs is killed. The result is filed while it
grows, so that a machine that is lost leaves what was done.

    equalities   kernels, optimizers, FSDP2, checkpoints, the engine: against float64, the CPU or transformers
    training     tokens/s, MFU, memory, checkpoints, the loader
    serving      ms/token, prompts, many requests
    kernels      ours beside torch's and others'
    planner      what `penstock plan` says of all that

Exit code: 0 if every equality held, 1 if one did not or was not reached, 2 if nothing could be run. Figures
that miss their target are shown, and change no exit code.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / "src"),
    str(ROOT / "benchmarks"),
]  # a bare machine has a checkout and no installation

from gpu_parts.kit import Kit, warning  # noqa: E402
from gpu_parts.machine import probe  # noqa: E402
from gpu_parts.parts import PARTS, named  # noqa: E402
from gpu_parts.stopping import Stopped, raise_on_signals  # noqa: E402
from gpu_parts.unfit import Unfit  # noqa: E402

from penstock.core import clock  # noqa: E402

EXAMPLE = """
for example, on a machine with a GPU, from a checkout, without a network:

    python benchmarks/gpu.py --out results
    python benchmarks/gpu.py --out results --only serving,planner    # those two again, into the same result
    less results/gpu-2026-11-22.md

and anywhere, to see that the code runs, which measures nothing:

    python benchmarks/gpu.py --device cpu --size tiny --out /tmp/tried
"""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the result: JSON, page, plots, log"
    )
    parser.add_argument(
        "--device", default="cuda", help="what is measured; cpu tries the code (default: cuda)"
    )
    parser.add_argument(
        "--size", choices=["full", "tiny"], default="full", help="tiny: shapes that take seconds"
    )
    parser.add_argument(
        "--only",
        metavar="PART,...",
        help=f"some of {', '.join(part.name for part in PARTS)}; added to the newest result in --out",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default: 9)")
    options = parser.parse_args()
    began = clock.monotonic()
    raise_on_signals()
    said = warning(options.device, options.size)
    try:
        parts = named(options.only) if options.only else PARTS
        print(said, flush=True)
        machine = probe(options.device)
        return Kit(
            parts=parts,
            machine=machine,
            out=options.out,
            device=options.device,
            size=options.size,
            total_s=60 * options.minutes - (clock.monotonic() - began),
            is_added=options.only is not None,
        ).run()
    except Unfit as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:  # before the first part
        return stopped.exit_code
    finally:
        print(said)


if __name__ == "__main__":
    sys.exit(main())
