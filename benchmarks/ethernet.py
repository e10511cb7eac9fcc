"""What do the levers for slow networks give, each alone and together, beside FSDP2 as it comes?

    python benchmarks/ethernet.py --out benchmarks/results
    python benchmarks/ethernet.py --quick

Hosts are emulated on this machine (docs/netlab.md; it needs root). A Llama of 7 million parameters is trained
in float32 on two hosts, with one process each or two. Settings:

    naive       FSDP2 as it comes: ethernet.overlap = false
    keep        parameters gathered and gradients reduced once a step: ethernet.keep_mib = inf
    overlap     gathers run ahead, reductions behind; shards as naive, so memory is that of full sharding
    exact       both
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
setting counts only if its losses are those of naive, to 1e-6 of them; others are marked, and make this script
fail. `predicted` is the planner's time of the step, told only the NICs' rate and the compute.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from drawing import Line, lines
from ethernet_cases import BLOCKS, HOSTS, QUICK, SETTINGS, TINY, WHOLE, recipe_of
from pacing import pace
from planned import cluster_of, job_of, planned
from results_file import file_result

from penstock.core import clock
from penstock.core.units import si
from penstock.launch.netlab import lab, why_not
from penstock.launch.netlab.topology import parse_rate
from penstock.plan.predict import predict
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
        self._compute_s = {}

    def row(self, case, setting, losses=None):
        """Return what one setting takes in one case.

        Args:
            losses: those of the naive setting, to hold its own against.
        """
        naive = recipe_of(case, *SETTINGS["naive"], hidden=self._hidden)
        with lab(hosts=HOSTS, nics=case.nics, rate=case.rate) as hosts:
            emulation = Emulation(
                hosts=hosts, processes_per_host=case.processes, steps=self._steps, prepare=self._prepare(case)
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
        its = losses or measured.losses
        drift = max(abs(mine - other) / other for mine, other in zip(measured.losses, its, strict=True))
        return {
            "setting": setting,
            **sections,
            **measured.as_json(),
            "predicted_s": predict(job_of(recipe, world_size=emulation.world_size), cluster).step_s,
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

    def _prepare(self, case):
        if not case.is_paced:
            return lambda _: None
        return lambda state: pace(state.model, seconds=self._pace_s, num_blocks=BLOCKS)


def show(row, naive):
    """Print a row of the table."""
    faster = naive["step_s"] / row["step_s"]
    sent = max(row["sent_bytes"])
    print(
        f"  {row['setting']:9} {row['step_s']:7.2f} s  busy {row['busy']:4.0%}  {faster:5.1f}x  "
        f"predicted {row['predicted_s']:6.2f} s  {si(sent)}B sent  losses within {row['loss_drift']:.0e}"
        + ("" if row["counts"] else "  DOES NOT COUNT: other losses"),
        flush=True,
    )


def aims(results):
    """Return each aim, what was found, and whether that is enough."""
    found = {
        (case["rate"], case["micro_batches"], case["is_paced"], case["processes"], case["nics"]): case
        for case in results
    }

    def value(key, setting, name):
        rows = {row["setting"]: row for row in found.get(key, {"rows": []})["rows"] if row["counts"]}
        return rows[setting][name] if setting in rows else None

    def faster(key, setting):
        before, after = value(key, "naive", "step_s"), value(key, setting, "step_s")
        return None if before is None or after is None else before / after

    at_500, slow = ("500mbit", 4, True, 1, 1), ("200mbit", 4, True, 1, 1)
    wanted = [
        (
            "busy, 500 Mbit, 4 micro-batches, naive (aim: under 20%)",
            value(at_500, "naive", "busy"),
            lambda x: x < 0.2,
        ),
        (
            "busy, 500 Mbit, 4 micro-batches, exact (aim: over 75%)",
            value(at_500, "exact", "busy"),
            lambda x: x > 0.75,
        ),
        (
            "busy, 500 Mbit, 16 micro-batches, exact (aim: over 90%)",
            value(("500mbit", 16, True, 1, 1), "exact", "busy"),
            lambda x: x > 0.9,
        ),
        ("times faster, 200 Mbit, exact (aim: 5)", faster(slow, "exact"), lambda x: x >= 5),
        ("times faster, 200 Mbit, fully sharded memory (aim: 2)", faster(slow, "overlap"), lambda x: x >= 2),
    ]
    return [{"aim": aim, "found": x, "met": enough(x)} for aim, x, enough in wanted if x is not None]


def draw(results):
    """Return the plots: bandwidth against busy share, a line a setting."""
    drawings = {}
    for is_paced in (True, False):
        alike = [
            c
            for c in results
            if c["is_paced"] is is_paced and (c["micro_batches"], c["processes"], c["nics"]) == (4, 1, 1)
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder to file the result in")
    parser.add_argument(
        "--quick", action="store_true", help="500 Mbit, paced, three settings: about a minute"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose title has this")
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
    for case, settings in TINY if arguments.tiny else QUICK if arguments.quick else WHOLE:
        if arguments.only not in case.title:
            continue
        print(case.title, flush=True)
        naive = measuring.row(case, "naive")
        rows = [naive]
        show(naive, naive)
        for setting in settings[1:]:
            rows.append(measuring.row(case, setting, naive["losses"]))
            show(rows[-1], naive)
        results.append({**dataclasses.asdict(case), "mbit_s": parse_rate(case.rate) / 1e6, "rows": rows})
    found = aims(results)
    for aim in found:
        print(f"{'met   ' if aim['met'] else 'MISSED'}  {aim['found']:.2f}  {aim['aim']}")
    print(f"{clock.monotonic() - begun:.0f} s")
    if arguments.out is not None:
        result = {
            "arguments": {"pace_s": arguments.pace, "steps": arguments.steps, "hidden": arguments.hidden}
        }
        result |= {"cases": results, "aims": found}
        name = "-".join(["ethernet", *arguments.only.replace(",", "").split()])
        file_result(arguments.out, name, result, drawings=draw(results), packages=("torch",))
    sys.exit(not all(row["counts"] for case in results for row in case["rows"]))


if __name__ == "__main__":
    main()
