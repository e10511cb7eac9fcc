"""What do the levers for slow networks give, each alone and together, beside FSDP2 as it comes and tuned?

    python benchmarks/ethernet.py --out benchmarks/results
    python benchmarks/ethernet.py --only "500mbit, paced" --out benchmarks/results
    python benchmarks/ethernet.py --quick

Hosts are emulated on this machine (docs/how-to/emulate-a-network.md; it needs root). A Llama of 7 million
parameters is trained in float32 on two hosts, with one process each or two. Settings:

    naive       FSDP2 as it comes: ethernet.overlap = false
    prefetch    and with its explicit prefetch, two blocks ahead; on CPUs a prefetched gather blocks as well
    tuned       FSDP2 set for gradient accumulation: reshard_after_forward = false, set_reshard_after_backward
                and set_requires_gradient_sync on the last micro-batch only
    tuned, unshard   and all gathers of a step begun before it: unshard(async_op=True)
    keep        parameters gathered and gradients reduced once a step: ethernet.keep_mib = inf
    overlap     gathers run ahead, reductions behind; shards as naive, so memory is that of full sharding
    exact       both
    breadth     overlap, each block run for all micro-batches in turn: ethernet.schedule = "breadth_first"
    breadth, kept   and gathered once for both passes: ethernet.keep_mib = inf
    one card    both, each collective one operation, which uses one NIC of two; exact uses both
    copies      shards inside a host and copies between hosts, parallel.replicate = 2
    hpz         overlap, the second gather inside a host: parallel.hierarchy = "hpz"
    hybrid      both of exact on such copies: parallel.hierarchy = "hybrid"
    planned     what the planner chooses, all memory allowed (`penstock plan`); micro-batches as the others
    int8        both of exact, weights gathered in int8: not exact, losses differ
    int8 both   gradients reduced in int8 too: not exact

Compute is paced: blocks sleep until `--pace` seconds a micro-batch are over, and take no processor from the
network (benchmarks/pacing.py); or real, rows of 128 tokens. `busy` is compute over step: the paced compute,
without embedding and loss, or what unsharded replicas with the same micro-batches took. A row of an exact
setting counts only if its losses are those of the first setting, to 1e-6 of them; others are marked.
`predicted` is the planner's time of the step, told only the NICs' rate and the compute.

`at best` is what the schedule allows on a perfect network of that rate: the compute that can hide nothing,
plus the longer of the rest of the compute and of the bytes that were sent over the rate. FSDP2 on CPUs hides
nothing; what is kept through a step depth first is gathered and reduced beside one of its micro-batches, all
else beside each. Then come the bytes that a host sent, and those of a rank's tensors at their most.

Where a case has rounds, its settings take turns, and the median round counts. The exit code is 1 if a row
does not count or an aim was missed. Cases that are measured again replace those filed on the same day.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from drawing import Line, lines
from ethernet_cases import BLOCKS, HOSTS, QUICK, SETTINGS, STOCK, TINY, WHOLE, recipe_of
from pacing import pace
from planned import cluster_of, job_of, planned
from results_file import file_result
from stock_fsdp import StockSchedule

from penstock.core import clock
from penstock.core.units import mib, si
from penstock.netlab.hosts import lab, why_not
from penstock.netlab.topology import parse_rate
from penstock.plan.predict import predict
from penstock.testing.ranks import on_ranks
from penstock.testing.step_memory import peak_of_step
from penstock.train.emulated import Emulation

INEXACT = ("int8", "int8 both")
TOLERANCE = 1e-6


def explain(error):
    """Say what a rank failed of."""
    return f"{type(error).__name__}: {error}", 1


class Measuring:
    """Measures rows; the compute of equal ones only once."""

    def __init__(self, *, steps, pace_s, hidden):
        self._steps, self._pace_s, self._hidden = steps, pace_s, hidden
        self._compute_s, self._peaks = {}, {}

    def row(self, case, setting, losses=None):
        """Return what one setting takes in one case.

        Args:
            losses: those of the case's first setting, to hold its own against.
        """
        naive = recipe_of(case, *SETTINGS["naive"], hidden=self._hidden)
        with lab(hosts=HOSTS, nics=case.nics, rate=case.rate) as hosts:
            emulation = Emulation(
                hosts=hosts,
                processes_per_host=case.processes,
                steps=self._steps,
                prepare=self._prepare(case, setting),
            )
            compute_s = self._compute(case, emulation, naive)
            cluster = cluster_of(
                job_of(naive, world_size=emulation.world_size),
                nodes=HOSTS,
                nics=case.nics,
                gbit_s=parse_rate(case.rate) / 1e9,
                compute_s=compute_s,
            )
            if setting == "planned":
                sections = planned(naive, cluster)
                recipe = recipe_of(
                    case, sections.get("ethernet", {}), sections["parallel"], hidden=self._hidden
                )
            else:
                sections = {}
                recipe = recipe_of(case, *SETTINGS[setting], hidden=self._hidden)
            measured = emulation.measure(recipe, explain, compute_s=compute_s)
        network_s = 8 * max(measured.sent_bytes) / (parse_rate(case.rate) * case.nics)
        its = losses or measured.losses
        drift = max(abs(mine - other) / other for mine, other in zip(measured.losses, its, strict=True))
        return {
            "setting": setting,
            **sections,
            **measured.as_json(),
            "predicted_s": predict(job_of(recipe, world_size=emulation.world_size), cluster).step_s,
            "peak_bytes": self._peak(case, setting, recipe),
            "network_s": network_s,
            "at_best_s": at_best(
                measured.compute_s,
                network_s,
                hiding=hiding_share(recipe, STOCK.get(setting, ()), case.micro_batches),
            ),
            "loss_drift": drift,
            "counts": drift <= TOLERANCE or setting in INEXACT,
        }

    def _compute(self, case, emulation, naive):
        """Return the compute of a step: what was set, which other work cannot change, or that of replicas."""
        if case.is_paced:
            return case.micro_batches * self._pace_s
        alike = (case.micro_batches, case.processes)
        if alike not in self._compute_s:
            self._compute_s[alike] = emulation.time_replicas(naive, explain)
        return self._compute_s[alike]

    def _prepare(self, case, setting):
        def prepare(state):
            if setting in STOCK:
                state.ethernet = StockSchedule(state.model, STOCK[setting])
            if case.is_paced:
                pace(state.model, seconds=self._pace_s, num_blocks=BLOCKS)

        return prepare

    def _peak(self, case, setting, recipe):
        """Return the most bytes that the tensors of a rank take at a moment of a step."""
        alike = (setting, case.micro_batches, case.processes, str(recipe.parallel), str(recipe.ethernet))
        if alike not in self._peaks:
            local = dataclasses.replace(case, is_paced=False)

            def peak(world):
                os.environ["LOCAL_WORLD_SIZE"] = str(case.processes)
                return peak_of_step(recipe, world, prepare=self._prepare(local, setting))

            self._peaks[alike] = max(on_ranks(peak, ranks=HOSTS * case.processes))
        return self._peaks[alike]

    def rows(self, case, settings):
        """Return what each setting takes in one case, in turns."""
        rounds = {setting: [] for setting in settings}
        losses = None
        for _ in range(case.rounds):
            for setting in settings:
                rounds[setting].append(self.row(case, setting, losses))
                losses = losses or rounds[setting][0]["losses"]
                show(rounds[setting][-1], rounds[settings[0]][0])
        return [median_of_rounds(alike) for alike in rounds.values()]


def median_of_rounds(rows):
    """Return the row of the median step, or of the faster one of two in the middle, with the steps of all."""
    by_step = sorted(rows, key=lambda row: row["step_s"])
    middle = by_step[(len(rows) - 1) // 2]
    return {
        **middle,
        "rounds_s": [row["step_s"] for row in rows],
        "counts": all(row["counts"] for row in rows),
    }


def hiding_share(recipe, switches, num_micro_batches):
    """Return beside which share of a step's compute bytes are sent.

    Args:
        switches: of FSDP2 alone.
    """
    if not recipe.ethernet.overlap and "unshard" not in switches:
        return 0
    is_once = recipe.ethernet.keep_mib and recipe.ethernet.schedule == "depth_first"
    return 1 / num_micro_batches if is_once else 1


def at_best(compute_s, network_s, *, hiding):
    """Return the shortest step in which `hiding`, a share of the compute, can hide what the network carries.

    >>> round(at_best(1.04, 0.454, hiding=0.25), 3), round(at_best(1.04, 0.454, hiding=1), 3)
    (1.234, 1.04)
    """
    return (1 - hiding) * compute_s + max(hiding * compute_s, network_s)


def show(row, first):
    """Print a row of the table."""
    faster = first["step_s"] / row["step_s"]
    sent = max(row["sent_bytes"])
    print(
        f"  {row['setting']:14} {row['step_s']:6.2f} s  busy {row['busy']:4.0%}  {faster:5.1f}x  "
        f"at best {row['at_best_s']:5.2f} s  predicted {row['predicted_s']:5.2f} s  "
        f"{si(sent)}B sent, {row['network_s']:.2f} s of network  {mib(row['peak_bytes'])}  "
        f"losses within {row['loss_drift']:.0e}"
        + ("" if row["counts"] else "  DOES NOT COUNT: other losses"),
        flush=True,
    )


def aims(results):
    """Return each aim, what was found, and whether that is enough."""

    def row_of(setting, *, rate="500mbit", micro_batches=4, rounds=1):
        for case in results:
            alike = (case["rate"], case["micro_batches"], case["rounds"]) == (rate, micro_batches, rounds)
            if alike and case["is_paced"] and (case["processes"], case["nics"]) == (1, 1):
                found = [row for row in case["rows"] if row["setting"] == setting and row["counts"]]
                return found[0] if found else None
        return None

    def busy(setting, **case):
        row = row_of(setting, **case)
        return None if row is None else row["busy"]

    def faster(setting, than="naive", **case):
        before, after = row_of(than, **case), row_of(setting, **case)
        return None if before is None or after is None else before["step_s"] / after["step_s"]

    wanted = [
        ("busy, 500 Mbit, 4 micro-batches, naive (aim: under 20%)", busy("naive"), lambda x: x < 0.2),
        ("busy, 500 Mbit, 4 micro-batches, exact (aim: over 75%)", busy("exact"), lambda x: x > 0.75),
        (
            "busy, 500 Mbit, 16 micro-batches, exact (aim: over 90%)",
            busy("exact", micro_batches=16, rounds=2),
            lambda x: x > 0.9,
        ),
        *(
            (
                f"times faster than tuned FSDP2, {rate}, breadth first, kept (aim: 1.6)",
                faster("breadth, kept", "tuned", rate=rate, rounds=3),
                lambda x: x >= 1.6,
            )
            for rate in ("200mbit", "500mbit")
        ),
        *(
            (
                f"times faster than {than}, 500mbit, 16 micro-batches, breadth first, kept (aim: 1)",
                faster("breadth, kept", than, micro_batches=16, rounds=2),
                lambda x: x >= 1,
            )
            for than in ("tuned", "exact")
        ),
        (
            "times faster than naive, 200 Mbit, exact (aim: 5)",
            faster("exact", rate="200mbit"),
            lambda x: x >= 5,
        ),
        (
            "times faster than naive, 200 Mbit, fully sharded memory (aim: 2)",
            faster("overlap", rate="200mbit"),
            lambda x: x >= 2,
        ),
    ]
    return [{"aim": aim, "found": x, "met": enough(x)} for aim, x, enough in wanted if x is not None]


def draw(results):
    """Return the plots: bandwidth against busy share, a line a setting."""
    drawings = {}
    for is_paced in (True, False):
        alike = [
            c
            for c in results
            if c["is_paced"] is is_paced
            and (c["micro_batches"], c["processes"], c["nics"], c["rounds"]) == (4, 1, 1, 1)
        ]
        series = {}
        for case in alike:
            for row in case["rows"]:
                if row["counts"]:
                    series.setdefault(row["setting"], []).append(
                        (case["mbit_s"], 100 * min(row["busy"], 1.0))
                    )
        if len(alike) > 1:
            compute = "paced" if is_paced else "real"
            drawings[compute] = lines(
                f"Busy share of two hosts, {compute} compute, 4 micro-batches",
                [Line(name=name, x=[x for x, _ in at], y=[y for _, y in at]) for name, at in series.items()],
                x_label="Mbit/s of each host's NIC",
                y_label="busy, %",
                log_x=True,
                from_zero=True,
            )
    return drawings


def filed_today(folder, setup):
    """Return the cases that were filed on this day with the same arguments."""
    path = folder / f"ethernet-{clock.utc_now()[:10]}.json"
    filed = json.loads(path.read_text()) if path.exists() else {"arguments": None}
    return filed["cases"] if filed["arguments"] == setup else []


def joined(filed, measured):
    """Return cases in the order of `WHOLE`, those measured now in the place of those filed before."""
    order = [case.title for case, _ in WHOLE]
    by_title = {case["title"]: case for case in (*filed, *measured)}
    return sorted(
        by_title.values(), key=lambda case: order.index(case["title"]) if case["title"] in order else -1
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder to file the result in")
    parser.add_argument(
        "--quick", action="store_true", help="500 Mbit, paced, three settings: about a minute"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the case with this title, or all that contain it"
    )
    parser.add_argument("--tiny", action="store_true", help="two settings, to see that it runs")
    parser.add_argument("--steps", type=int, default=3, help="the first does not count; default: 3")
    parser.add_argument(
        "--pace", type=float, default=0.26, help="seconds of a paced micro-batch; default: 0.26"
    )
    parser.add_argument("--hidden", type=int, default=256, help="width of the model; default: 256")
    arguments = parser.parse_args()
    if refused := why_not():
        sys.exit(refused)
    begun, measuring, results = (
        clock.monotonic(),
        Measuring(steps=arguments.steps, pace_s=arguments.pace, hidden=arguments.hidden),
        [],
    )
    cases = TINY if arguments.tiny else QUICK if arguments.quick else WHOLE
    named = [chosen for chosen in cases if arguments.only == chosen[0].title]
    for case, settings in named or [chosen for chosen in cases if arguments.only in chosen[0].title]:
        print(case.title, flush=True)
        rows = measuring.rows(case, settings)
        results.append(
            {
                **dataclasses.asdict(case),
                "title": case.title,
                "mbit_s": parse_rate(case.rate) / 1e6,
                "rows": rows,
            }
        )
    setup = {"pace_s": arguments.pace, "steps": arguments.steps, "hidden": arguments.hidden}
    found = aims(results)
    for aim in found:
        print(f"{'met   ' if aim['met'] else 'MISSED'}  {aim['found']:.2f}  {aim['aim']}")
    print(f"{clock.monotonic() - begun:.0f} s")
    if arguments.out is not None:
        filed = joined(filed_today(arguments.out, setup), results)
        result = {"arguments": setup, "cases": filed, "aims": aims(filed)}
        file_result(arguments.out, "ethernet", result, drawings=draw(filed), packages=("torch",))
    all_count = all(row["counts"] for case in results for row in case["rows"])
    sys.exit(not all_count or not all(aim["met"] for aim in found))


if __name__ == "__main__":
    main()
