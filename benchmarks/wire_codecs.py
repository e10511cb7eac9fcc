"""What do the codecs for the wire cost on this CPU, and what do they lose, by numbers that share a scale?

    python benchmarks/wire_codecs.py --out benchmarks/results

One thread encodes and decodes `--numbers` float32. Speed is in GB of float32 a second of CPU time, settings
in turn. Loss is the norm of the error over that of the numbers, in dB: of normal numbers, and of Student's t
with three degrees of freedom, whose tails are as long as those of gradients.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from measuring import interleaved, median
from results_file import file_result

from penstock.parallel.ethernet import codecs, wire_size
from penstock.parallel.ethernet.codecs import decode, encode

CODECS = ("bfloat16", "float8", "int8", "int4")
BLOCKS = (32, 64, 128, 256, 512, 1024)


def speeds(x, *, rounds):
    """Return what was done -> GB of float32 a second of CPU time."""

    def work(act, *arguments, **more):
        act(*arguments, **more)
        return x.nbytes

    settings = {}
    for codec in CODECS:
        settings[f"encode {codec}"] = partial(work, encode, x, codec)
        settings[f"decode {codec}"] = partial(work, decode, encode(x, codec), codec, size=len(x))
    found = interleaved(settings, rounds=rounds)
    return {name: round(median(rates["per_cpu_s"]) / 1e9, 1) for name, rates in found.items()}


def loss_db(x, codec):
    """Return the norm of what a codec loses over that of the numbers, in dB."""
    lost = decode(encode(x, codec), codec, size=len(x)) - x
    return round(20 * math.log10(lost.norm() / x.norm()), 1)


def losses(samples):
    """Return a row for each size of a block and codec; the module's constant is restored."""
    rows, chosen = [], wire_size.BLOCK
    for block in BLOCKS:
        codecs.BLOCK = wire_size.BLOCK = block
        for codec in CODECS[1:]:
            bits = 8 * wire_size.encoded_bytes(1 << 20, codec) / (1 << 20)
            rows.append({"block": block, "codec": codec, "bits": bits})
            rows[-1] |= {f"{name}, dB": loss_db(x, codec) for name, x in samples.items()}
    codecs.BLOCK = wire_size.BLOCK = chosen
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numbers", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = {
        "normal": torch.randn(arguments.numbers),
        "long tails": torch.distributions.StudentT(3.0).sample((arguments.numbers,)),
    }
    result = {
        "numbers": arguments.numbers,
        "gb_per_cpu_second": speeds(samples["normal"], rounds=arguments.rounds),
        "losses": losses(samples),
    }
    for name, found in result["gb_per_cpu_second"].items():
        print(f"{name:16} {found:5} GB/s")
    for row in result["losses"]:
        print("   ".join(f"{name} {value}" for name, value in row.items()))
    if arguments.out:
        file_result(arguments.out, "wire_codecs", result, packages=["torch"])


if __name__ == "__main__":
    main()
