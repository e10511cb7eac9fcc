"""`penstock netlab run`: what a network makes of a recipe, before there is one."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.main import explain
from penstock.core.units import si
from penstock.launch.netlab import Link, Topology, emulated
from penstock.launch.netlab.topology import parse_latency
from penstock.train.recipe import load_recipe

if TYPE_CHECKING:
    from penstock.train.emulated import Measured

_SOUND = 1.02  # a step cannot be shorter than its computation; beyond chance, the two were not measured alike

EPILOG = """\
Every host is a network namespace with NICs of its own, whose rate the kernel limits; the ranks are forked
into them and share the cores of this machine. Nothing outside the namespaces is touched, and nothing of them
is left, however this ends. It needs root, or `unshare --map-root-user --net penstock netlab run ...`.

  step      median time of a step, of islands the mean; the first, which warms up, is left out
  compute   forward and backward passes of an unsharded replica with the same micro-batches, on the same cores
  busy      compute / step: 100% where the network costs nothing
  sent      bytes that left the NICs of each host in a step, by their own counters

The recipe's own folder is not written to. On two cores, two hosts have a core each: their compute is slow,
and a network seems faster beside it than it is. See docs/netlab.md.

example:
  penstock netlab run recipe.toml --hosts 2 --rate 200mbit
  penstock netlab run recipe.toml --hosts 2 --rate 200mbit --set ethernet.overlap=false
  penstock netlab run recipe.toml --hosts 2 --processes-per-host 2 --nics 2 --rate 500mbit --latency 1ms

exit codes: 0 done, 1 failed, 2 wrong usage or not allowed here, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("recipe", type=Path, help="TOML file; see `penstock recipes`")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--nics", type=int, default=1, metavar="N", help="of each host; default: 1")
    parser.add_argument(
        "--rate", default="", metavar="RATE", help="of a NIC, each way: 200mbit, 2.5gbit; default: no limit"
    )
    parser.add_argument("--latency", default="0ms", metavar="TIME", help="one way: 0.5ms; default: none")
    parser.add_argument("--processes-per-host", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="default: 5, of which 4 count")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a recipe key"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train on emulated hosts and print what was measured."""
    recipe = load_recipe(arguments.recipe, arguments.set)
    topology = Topology(
        num_hosts=arguments.hosts,
        num_nics=arguments.nics,
        link=Link(rate=arguments.rate),
        latency_s=parse_latency(arguments.latency),
    )
    from penstock.train.emulated import Emulation  # torch; imported once, before processes fork

    with emulated(topology) as hosts:
        emulation = Emulation(
            hosts=hosts,
            processes_per_host=arguments.processes_per_host,
            steps=arguments.steps,
            shows_progress=True,
        )
        print("timing unsharded replicas first, then training", file=sys.stderr, flush=True)
        measured = emulation.measure(recipe, explain)
    print(json.dumps(measured.as_json()) if arguments.json else _as_text(measured, arguments))
    return 0


def _as_text(measured: "Measured", arguments: argparse.Namespace) -> str:
    network = f"NICs: {arguments.nics} of {arguments.rate or 'any rate'}, latency: {arguments.latency}"
    doubt = "  (other work slowed the replicas: measure on a quiet machine)" if measured.busy > _SOUND else ""
    return "\n".join(
        [
            f"hosts: {arguments.hosts}, processes on each: {arguments.processes_per_host}, {network}",
            f"step     {measured.step_s:.3g} s",
            f"compute  {measured.compute_s:.3g} s",
            f"busy     {measured.busy:.0%}{doubt}",
            "sent     " + " ".join(f"{si(each)}B" for each in measured.sent_bytes),
            "losses   " + " ".join(f"{loss:.6f}" for loss in measured.losses),
        ]
    )
