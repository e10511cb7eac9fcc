"""Prove a GPU: how fast it is, that what is computed on it is right, and whether the planner foretold that.

Cases run in order of value, training first, those of one part in a process of their own; each has a budget,
and what it leaves goes to the next. Two commands of nine minutes each cover all of them: `--part speed`, then
`--part rest`, which is added to the same result. A case that hangs or ends its process costs itself, and the
rest goes on in a fresh process. The result is filed while it grows, so that a machine that is lost leaves
what was done, and `--resume` runs what is missing.

    training     tokens/s, MFU, memory, checkpoints, the loader; a plain loop beside it
    serving      ms/token, prompts, many requests
    kernels      ours beside torch's and others'
    equalities   kernels, optimizers, FSDP2, checkpoints, the engine: against float64, the CPU or transformers
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

from gpu_parts.cases import CASES, COMMAND_S, COMMANDS, choose, named, of_command  # noqa: E402
from gpu_parts.kit import Kit  # noqa: E402
from gpu_parts.machine import probe  # noqa: E402
from gpu_parts.result import Result, warning  # noqa: E402
from gpu_parts.stopping import Stopped, raise_on_signals  # noqa: E402
from gpu_parts.unfit import Unfit  # noqa: E402

from penstock.core import clock  # noqa: E402

UNTIMED_S = 3400.0  # where budgets of an H100 say nothing
EXAMPLE = """
for example, on a machine with a GPU, from a checkout, without a network:

    python benchmarks/gpu.py --out results --part speed
    python benchmarks/gpu.py --out results --part rest                           # into the same result
    python benchmarks/gpu.py --out results --rows train-1b,serve-8b --seconds 200      # those two again
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
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--part", default="", help=f"{' or '.join(COMMANDS)} (default: both)")
    chosen.add_argument(
        "--rows",
        default="",
        metavar="CASE,...",
        help=f"some cases, added to the newest result in --out: {', '.join(case.name for case in CASES)}; "
        "or all of training, serving, kernels, equalities, planner",
    )
    parser.add_argument(
        "--seconds", type=float, help=f"for all cases together (default: {COMMAND_S:.0f} a command)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out what the newest result in --out has already"
    )
    options = parser.parse_args()
    began = clock.monotonic()
    raise_on_signals()
    said = warning(options.device, options.size)
    try:
        wanted = named(options.rows) if options.rows else of_command(options.part)
        print(said, flush=True)
        machine = probe(options.device)
        result = Result.open(
            options.out,
            machine=machine,
            device=options.device,
            size=options.size,
            is_added=options.resume or bool(options.rows) or options.part == COMMANDS[-1],
        )
        if options.resume:
            wanted = [case for case in wanted if not result.has_done(case.part, case.name)]
        total_s = COMMAND_S * (1 if options.part else len(COMMANDS))
        if options.size == "tiny" or machine["is_null"]:
            total_s = UNTIMED_S
        total_s = options.seconds or total_s
        choice = choose(wanted, total_s, canaries=options.size != "tiny")
        print(f"{choice} of {total_s:.0f}", flush=True)
        result.found["left_out"] = [case.name for case in choice.left_out]
        return Kit(
            cases=choice.cases,
            result=result,
            device=options.device,
            size=options.size,
            total_s=total_s - (clock.monotonic() - began),
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
