"""Check a machine, or all machines of a run together, before a run; report problems and what to do.

example:
  penstock doctor
  penstock doctor --corpus corpus --store s3://bucket/scratch --folder /data/runs
  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 -m penstock doctor --out cluster.toml
  penstock doctor --processes 2
  penstock doctor --every 1h --metrics-port 9092 --checks gpus,copies

Green is as it should be, yellow works but costs speed or safety, red fails, hangs or is several times
slower. Each yellow and red line says what to do. Nothing is changed: files written for measuring, in
--folder and --store, are deleted.

exit codes: 0 no red line, 1 a red line or a rank that could not report, 2 wrong usage, 3 red lines, of which
none is left without the nodes that are listed to leave out
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from penstock.cli.streams import complain, explain
from penstock.core import env
from penstock.core.errors import UsageError, nearest
from penstock.core.files import check_folder_of
from penstock.core.log import set_up
from penstock.core.signals import StopFlag
from penstock.core.units import parse_duration
from penstock.launch.local import check_processes
from penstock.launch.local import run as run_processes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--corpus", default="", metavar="CORPUS", help="measure the loader on this corpus")
    parser.add_argument(
        "--store", default="", metavar="ADDRESS", help="measure an object store, below s3://, gs:// or az://"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="measure the disk of this folder; default: here",
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes on this machine")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="bound on the time for links; default: 60"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=20.0,
        metavar="S",
        help="timeout of a message between nodes; default: 20",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the detected machines for penstock plan"
    )
    parser.add_argument(
        "--network",
        action="append",
        default=[],
        metavar="NIC",
        help="measure links over this interface of every machine; may be repeated; default: all usable",
    )
    parser.add_argument(
        "--exclude", type=Path, metavar="FILE", help="write the hosts to leave out, one a line; may be empty"
    )
    parser.add_argument(
        "--metrics", type=Path, metavar="FILE", help="write the links and outliers as Prometheus text"
    )
    parser.add_argument(
        "--checks",
        default="",
        metavar="NAMES",
        help="run these checks of a machine alone: gpus,copies; default: all",
    )
    parser.add_argument(
        "--expect-gpus", type=int, metavar="N", help="NVIDIA GPUs of a machine; default: those on its PCI bus"
    )
    parser.add_argument(
        "--every",
        metavar="TIME",
        help="check again every 15m, 1h ..., until a signal; needs --metrics-port or "
        "a pod in which PENSTOCK_NODE names the node whose condition is set",
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="N", help="with --every: serve the findings to Prometheus"
    )
    parser.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address of that port; default: 127.0.0.1, for this machine only",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print the report."""
    for name in ("seconds", "timeout"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise UsageError(f"--{name} must be above 0", got=getattr(arguments, name))
    for option in ("out", "exclude", "metrics"):
        if path := getattr(arguments, option):
            check_folder_of(path, option=f"--{option}")
    if arguments.store:
        from penstock.doctor.checks.object_store import place_of

        place_of(arguments.store)  # an invalid address is refused before measuring
    if arguments.every:
        return _watch(arguments)
    if arguments.metrics_port is not None:
        raise UsageError("--metrics-port is for a doctor that stays", fix="Add --every, say --every 1h.")
    check_processes(arguments.processes)
    env.silence_torch()
    import penstock.doctor.run_checks  # torch; imported once, before processes fork

    _check_names(arguments.checks, penstock.doctor.run_checks.CHECKS)

    if arguments.processes == 1:
        return _examine(arguments)
    outcome = run_processes(lambda: _examine(arguments), explain, processes=arguments.processes)
    for message in outcome.messages:
        complain(message)
    return outcome.code


def _check_names(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the names of checks in a text.

    Raises:
        UsageError: one is not known.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise UsageError("--checks names no check of a machine", got=name, fix=nearest(name, list(known)))
    return names


def _watch(arguments: argparse.Namespace) -> int:
    """Check at intervals until a signal."""
    from penstock.doctor.daemon import run as watch
    from penstock.doctor.node_group import host_name

    api, port = env.cluster_api(), arguments.metrics_port
    if port is None and api is None:
        raise UsageError(
            "--every tells nobody what it finds", fix="Add --metrics-port, or set PENSTOCK_NODE in a pod."
        )
    if port is not None and not 0 < port < 65536:
        raise UsageError("--metrics-port is no TCP port", got=port)
    of_many = (arguments.out, arguments.exclude, arguments.metrics, arguments.json, arguments.network)
    if arguments.processes != 1 or any(of_many):
        raise UsageError(
            "--every checks one machine",
            fix="Leave --processes, --out, --exclude, --metrics, --network and --json out.",
        )
    every_s = parse_duration(arguments.every)
    set_up()
    flag = StopFlag().install()
    words = ["--folder", str(arguments.folder), "--seconds", str(arguments.seconds)]
    for name in ("corpus", "store", "checks"):
        if value := getattr(arguments, name):
            words += [f"--{name}", value]
    if arguments.expect_gpus is not None:
        words += ["--expect-gpus", str(arguments.expect_gpus)]
    watch(
        words,
        every_s=every_s,
        host=arguments.metrics_host,
        port=port,
        node=api.node if api else host_name(),
        api=api,
        is_stopped=lambda: flag.requested_by is not None,
    )
    return 0


def _examine(arguments: argparse.Namespace) -> int:
    from penstock.core.files import write_atomic
    from penstock.doctor.checks.check import CheckOptions
    from penstock.doctor.cluster import cluster_of
    from penstock.doctor.link_metrics import metrics_text
    from penstock.doctor.outliers import hosts_to_leave_out
    from penstock.doctor.report import as_json, as_text
    from penstock.doctor.run_checks import CHECKS, examine
    from penstock.plan.hardware import write

    options = CheckOptions(
        folder=arguments.folder,
        corpus=arguments.corpus,
        store=arguments.store,
        networks=tuple(arguments.network),
        seconds=arguments.seconds,
        only=_check_names(arguments.checks, CHECKS),
        expected_gpus=arguments.expect_gpus,
    )
    report = examine(options, timeout_s=arguments.timeout, on_check=_progress)
    if report is None:
        return 0
    print(json.dumps(as_json(report)) if arguments.json else "\n".join(as_text(report)))
    if arguments.out:
        cluster, assumed = cluster_of(report)
        write(cluster, arguments.out)
        for line in assumed:
            print(f"{arguments.out}: assumed {line}", file=sys.stderr)
    if arguments.exclude:
        hosts = hosts_to_leave_out(report.outliers)
        write_atomic(arguments.exclude, "".join(f"{host}\n" for host in hosts))
    if arguments.metrics:
        text = metrics_text(report.links, report.outliers, report.hosts, seconds=report.seconds)
        write_atomic(arguments.metrics, text)
    return report.exit_code


def _progress(check: str) -> None:
    if env.ranks().rank == 0 and sys.stderr.isatty():
        print(f"\r\033[Kexamining {check} ...", end="" if check != "links" else "\r\033[K", file=sys.stderr)
