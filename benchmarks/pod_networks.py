"""What does a second network card in the pods give a training run on two nodes?

    python benchmarks/pod_networks.py --out benchmarks/results

Two emulated nodes have two cards each, limited to --rate. Our NetworkAttachmentDefinitions are run by real
CNI plugins (tests/pods.py; it needs root and Debian's containernetworking-plugins), once with one
network declared and once with both. In each pod the check of its networks derives gloo's variables, and a
Llama of 7 million parameters is trained in float32, sharded over the two pods, with parameters kept and
gradients reduced once a step. Its rows are short, so that the network is what a step waits for. Cards take
turns; the figures are medians of the rounds, the bytes those that the cards counted, with headers.

The aim is 1.7 times the bytes a second of one card; the exit code is 1 below it.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from ethernet_cases import KEPT, Case, recipe_of
from results_file import file_result

from penstock.core.units import mib
from penstock.launch.pod_networks import PodNetwork
from penstock.netlab.hosts import lab
from penstock.train.emulated import Emulation

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the set-up of the tests

from tests.pods import pods_on, why_no_pods

CARDS = 2


def explain(error):
    """Say what a rank failed of."""
    return f"{type(error).__name__}: {error}", 1


def measured(num_cards, *, rate, kind, steps, hidden):
    """Return the step time and the bytes a second that one pod sends over so many cards."""
    networks = [
        PodNetwork(master=f"eth{rail}", type=kind, subnet=f"10.88.{rail}.0/24") for rail in range(num_cards)
    ]
    recipe = recipe_of(Case(rate=rate, micro_batches=2), KEPT, {}, hidden=hidden)
    with (
        tempfile.TemporaryDirectory() as folder,
        lab(hosts=2, nics=CARDS, rate=rate) as hosts,
        pods_on(hosts, networks, Path(folder)) as pods,
    ):
        times = Emulation(hosts=pods, steps=steps).measure(recipe, explain, compute_s=0.0)
    sent = max(times.sent_bytes)
    return {
        "cards": num_cards,
        "step_s": times.step_s,
        "sent_bytes": sent,
        "bytes_per_s": sent / times.step_s,
        "losses": times.losses,
    }


def main():
    """Measure, print and file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--type", default="macvlan", choices=("macvlan", "host-device"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--aim", type=float, default=1.7, help="least ratio for the exit code 0")
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    if why := why_no_pods():
        print(why)
        return 0
    rows = [
        measured(
            num_cards,
            rate=arguments.rate,
            kind=arguments.type,
            steps=arguments.steps,
            hidden=arguments.hidden,
        )
        for _ in range(arguments.rounds)
        for num_cards in range(1, CARDS + 1)
    ]
    speeds = {
        num_cards: statistics.median(row["bytes_per_s"] for row in rows if row["cards"] == num_cards)
        for num_cards in range(1, CARDS + 1)
    }
    for num_cards, speed in speeds.items():
        step_s = statistics.median(row["step_s"] for row in rows if row["cards"] == num_cards)
        print(f"{num_cards} card{'s' * (num_cards > 1)}: {mib(speed)}/s from a pod, {step_s:.3f} s a step")
    ratio, are_equal = speeds[CARDS] / speeds[1], len({tuple(row["losses"]) for row in rows}) == 1
    print(f"both cards of {arguments.rate} move {ratio:.2f} times the bytes a second of one")
    print(f"losses are {'equal' if are_equal else 'NOT equal'} to the last bit")
    if arguments.out:
        settings = {key: str(value) for key, value in vars(arguments).items() if key not in ("aim", "out")}
        result = {
            "settings": settings,
            "ratio": ratio,
            "aim": arguments.aim,
            "equal_losses": are_equal,
            "rows": rows,
        }
        for path in file_result(arguments.out, "pod_networks", result, packages=("torch",)):
            print(path)
    return 0 if ratio >= arguments.aim and are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
