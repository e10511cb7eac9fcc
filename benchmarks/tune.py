"""What does tuning cost beside TRL with PEFT, and litgpt: tokens/s, memory, padding; and bytes on a network?

    python benchmarks/tune.py --out benchmarks/results                # some minutes; root for the network
    python benchmarks/tune.py --litgpt ~/litgpt/bin/python            # a Python that has litgpt, of its own

A tiny Llama in float32, the same conversations, rows, AdamW and threads for all, all weights and an adapter
of rank 16 in every linear layer of the blocks:

    penstock   `penstock tune`, packing = "whole": rows of whole conversations, a row at a time
               (data.micro_batch_size = 1, as here nothing is gathered that a micro-batch would share)
    trl        SFTTrainer with peft: its sampler `batch_rebalance`, micro-batches of three conversations on
               average; learned tokens by the template's tags, workers that load, no checkpoints, no logs
    trl, packed  a packed row at a time, packed by bfd
    litgpt     `litgpt finetune_full` and `finetune_lora`, a conversation at a time (it does not pack)

The peers add up gradients over as many tokens as ours, in the fastest form that was found for each. TRL's
sampler sorts a step's conversations by length, so that three on average pad 9%, five 17% and eight 30%; with
a step's packed rows at once TRL attends across all of them and is half as fast. Litgpt does not sort: two
conversations at once pad a quarter.

Each turn is a process of its own, and settings take turns. Tokens are those of conversations, padding left
out; time is from the end of the first steps to the end of the last, opening and saving not in it. Medians
over rounds. Memory is the most that the process held.

The network: bytes that leave a host in a step, on two emulated hosts at 200 Mbit/s, of full tuning, and of an
adapter with the frozen weights sharded and whole (`penstock netlab`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from results_file import file_result
from tune_data import make

from penstock.netlab.hosts import why_not

WORKER = Path(__file__).with_name("tune_worker.py")
METHODS = ("full", "lora")
NETWORK = {
    "full": {"method": "full"},
    "lora, base sharded": {"method": "lora", "base_sharding": "sharded"},
    "lora, base whole": {"method": "lora", "base_sharding": "whole"},
}


def turn(folder, who, method, arguments):
    """Train in a process of its own; return what it measured, or None if it cannot run here."""
    python = arguments.litgpt if who == "litgpt" else sys.executable
    words = [who, method, folder, arguments.steps, arguments.rows, arguments.length, arguments.threads]
    command = [python, WORKER, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{who}, {method}: {done.stderr.strip()[-2000:]}", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def speeds(folder, arguments):
    """Return setting -> figures, medians over rounds, and the version of each package that ran."""
    peers = ["penstock", "trl", "trl, packed", *(["litgpt"] if arguments.litgpt else [])]
    peers = [who for who in peers if not arguments.only or who in arguments.only]
    found = {f"{who}, {method}": [] for method in METHODS for who in peers}
    versions = {}
    for number in range(arguments.rounds):
        for name, turns in found.items():
            who, _, method = name.rpartition(", ")
            if (taken := turn(folder, who, method, arguments)) is not None:
                versions[who.partition(",")[0]] = taken.pop("version")
                turns.append(taken)
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
    medians = {
        name: {key: median(each[key] for each in turns) for key in turns[0]}
        for name, turns in found.items()
        if turns
    }
    return medians, versions


def bytes_of_steps(folder, arguments):
    """Return setting -> bytes that leave a host in a step, and its seconds."""
    found = {}
    for name, tune in NETWORK.items():
        recipe = folder / f"network-{len(found)}.toml"
        recipe.write_text(recipe_text(folder, tune, arguments, run=f"network-{len(found)}"))
        words = [
            "run",
            recipe,
            "--hosts",
            2,
            "--rate",
            "200mbit",
            "--steps",
            arguments.network_steps,
            "--json",
        ]
        command = [sys.executable, "-m", "penstock", "netlab", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout)
    return {**found, "gradient_bytes_of_the_adapter": 4 * adapter_numbers(arguments)}


def adapter_numbers(arguments, *, rank=16):
    """Return the number of parameters of an adapter of every linear layer."""
    hidden, inner = arguments.hidden, 3 * arguments.hidden
    return arguments.layers * rank * (4 * 2 * hidden + 3 * (hidden + inner))


def recipe_text(folder, tune, arguments, *, run, data=""):
    """Return a recipe of Penstock; `data`: more lines of [data]."""
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in tune.items())
    return f"""
compute = "float32"
[run]
dir = "{folder}/{run}"
start_from = "{folder}/base"
steps = {arguments.steps}
[tune]
{settings}
[data]
sequence_length = {arguments.length}
global_batch_size = {arguments.rows}
packing = "whole"
overlong = "drop"
{data}
[data.corpora.chats]
path = "{folder}/chats"
[optim]
learning_rate = 1e-4
[schedule]
rule = "constant"
[checkpoint]
every = 1000000
"""


def main():
    """Measure, print and file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096, help="at most")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--network-steps", type=int, default=5, help="0: no network")
    parser.add_argument("--only", nargs="*", default=[], metavar="WHO")
    parser.add_argument("--litgpt", type=Path, metavar="PYTHON", help="an interpreter that has litgpt")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        make(folder, arguments)
        shape = json.loads((folder / "base" / "config.json").read_text())
        arguments.vocabulary = shape["vocab_size"]  # texts may not give as many tokens as were asked for
        for method in METHODS:
            (folder / f"{method}.toml").write_text(
                recipe_text(
                    folder,
                    {"method": method},
                    arguments,
                    run=f"run-{method}",
                    data="micro_batch_size = 1",
                )
            )
        found, versions = speeds(folder, arguments)
        refused = why_not() if arguments.network_steps else "not asked for"
        network = {} if refused else bytes_of_steps(folder, arguments)
    for name, figures in found.items():
        print(
            f"{name:<18}{figures['tokens_per_s']:>10,.0f} tokens/s{figures['peak_mib']:>8,.0f} MiB"
            f"{figures['padding']:>8.1%} padding"
        )
    for name, figures in network.items():
        print(f"{name:<20} {figures}")
    result = {
        "speed": found,
        "network": network or {"left_out": refused},
        "trainers": versions,
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("out", "litgpt")},
    }
    if arguments.out:
        packages = ("torch", "transformers", "trl", "peft")
        file_result(arguments.out, "tune", result, packages=packages)


if __name__ == "__main__":
    main()
