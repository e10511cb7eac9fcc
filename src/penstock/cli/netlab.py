"""Try a recipe on emulated hosts of this machine, with a network of given speed. Linux only.

example:
  penstock netlab run recipe.toml --hosts 2 --rate 200mbit
  penstock netlab run recipe.toml --hosts 2 --nics 2 --rate 500mbit --latency 1ms --json
"""

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from penstock.cli.options import (
    RecipeOptions,
    add_fields,
    add_recipe_settings,
    fields_of,
    options_of,
    recipe_settings,
)
from penstock.cli.streams import explain, note
from penstock.core.env import silence_torch
from penstock.core.units import si
from penstock.launch.local import check_processes
from penstock.netlab.hosts import emulated
from penstock.netlab.topology import Link, Topology, parse_latency
from penstock.train.resolve.load import load_recipe

if TYPE_CHECKING:
    from penstock.train.emulated import EmulatedTimes


_SOUND = 1.02  # busy share above which the measurement was disturbed: a step includes its computation

EPILOG = """\
Every host is a network namespace with its own NICs, whose rate the kernel limits; the ranks are forked
into them and share the cores of this machine. Nothing outside the namespaces is changed, and nothing of
them remains. It needs root, or `unshare --map-root-user --net penstock netlab run ...`.

  step      median time of a step, with islands the mean; the first step, a warm-up, is left out
  compute   forward and backward passes of an unsharded replica with the same micro-batches, on the same cores
  busy      compute / step: 100% if the network costs nothing
  sent      bytes that left the NICs of each host per step, by their own counters

The recipe's own folder is not written to. With two hosts on two cores each has one core: their compute is
slow, so a network seems faster than it is. See docs/how-to/emulate-a-network.md.

example:
  penstock netlab run recipe.toml --hosts 2 --rate 200mbit
  penstock netlab run recipe.toml --hosts 2 --rate 200mbit --set ethernet.overlap=false
  penstock netlab run recipe.toml --hosts 2 --processes-per-host 2 --nics 2 --rate 500mbit --latency 1ms

exit codes: 0 done, 1 failed, 2 wrong usage or not allowed here, 130 interrupted
"""


COMMANDS = {"run": "train a few steps of a recipe, and measure the cost of the network"}
"""Subcommand -> description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """Options of a trial on emulated hosts."""

    latency: Annotated[str, "TIME"] = "0ms"
    """Latency one way, such as 0.5ms."""
    processes_per_host: int = 1
    """Ranks on each host."""
    steps: int = 5
    """Steps to train; all but the first are measured."""
    oversubscribe: bool = False
    """Start more than 4 ranks on a core."""
    json: bool = False
    """Print JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand and its options."""
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser(
        "run",
        help=COMMANDS["run"],
        description="Train a few steps of a recipe, and measure the cost of the network.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_fields(command, RecipeOptions, "recipe")
    add_fields(command, Topology, num_hosts="--hosts", num_nics="--nics")
    add_fields(command, Link, "rate")
    add_fields(command, TrialOptions, "latency", "processes_per_host", "steps")
    add_recipe_settings(command)
    add_fields(command, TrialOptions, "oversubscribe", "json")


def run(arguments: argparse.Namespace) -> int:
    """Train on emulated hosts and print the measurements."""
    options = options_of(arguments, TrialOptions)
    recipe = load_recipe(options_of(arguments, RecipeOptions).recipe, recipe_settings(arguments))
    topology = Topology(
        **fields_of(arguments, Topology),
        link=Link(**fields_of(arguments, Link)),
        latency_s=parse_latency(options.latency),
    )
    ranks = topology.num_hosts * options.processes_per_host
    check_processes(ranks, oversubscribe=options.oversubscribe)
    silence_torch()  # of the store, whose waits begin short
    from penstock.train.emulated import Emulation  # torch; imported once, before processes fork

    with emulated(topology) as hosts:
        emulation = Emulation(
            hosts=hosts,
            processes_per_host=options.processes_per_host,
            steps=options.steps,
            shows_progress=True,
        )
        note("Timing unsharded replicas first, then training.")
        measured = emulation.measure(recipe, explain)
    print(json.dumps(measured.as_json()) if options.json else _as_text(measured, topology, options))
    return 0


def _as_text(measured: "EmulatedTimes", topology: Topology, options: TrialOptions) -> str:
    rate, latency = topology.link.rate or "any rate", options.latency
    network = f"NICs: {topology.num_nics} of {rate}, latency: {latency}"
    doubt = "  (other work slowed the replicas: measure on a quiet machine)" if measured.busy > _SOUND else ""
    return "\n".join(
        [
            f"hosts: {topology.num_hosts}, processes on each: {options.processes_per_host}, {network}",
            f"step     {measured.step_s:.3g} s",
            f"compute  {measured.compute_s:.3g} s",
            f"busy     {measured.busy:.0%}{doubt}",
            "sent     " + " ".join(f"{si(each)}B" for each in measured.sent_bytes),
            "losses   " + " ".join(f"{loss:.6f}" for loss in measured.losses),
        ]
    )
