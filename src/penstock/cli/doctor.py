"""Check a machine, or all machines of a run together, before a run; report problems and what to do.

example:
  penstock doctor
  penstock doctor --corpus corpus --store s3://bucket/scratch --folder /data/runs
  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 -m penstock doctor --out cluster.toml
  penstock doctor --processes 2
  penstock doctor --json --checks gpus,copies

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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.cli.options import add_fields, fields_of, options_of
from penstock.cli.streams import complain, explain
from penstock.core import env
from penstock.core.checks import check_seconds
from penstock.core.errors import UsageError, nearest
from penstock.core.files import check_folder_of
from penstock.doctor.checks.check import CheckOptions
from penstock.launch.local import check_processes
from penstock.launch.local import run as run_processes

_STDOUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of the doctor that are not about a check."""

    processes: int = 1
    """Processes on this machine."""
    timeout_s: float = 20.0
    """Timeout of a message between nodes."""
    out: Annotated[Path | None, "FILE"] = None
    """Write the detected machines for penstock plan."""
    exclude: Annotated[Path | None, "FILE"] = None
    """Write the hosts to leave out, one a line; may be empty."""
    checks: Annotated[str, "NAMES"] = ""
    """Run these checks of a machine alone: gpus,copies. Empty: all."""
    json: Annotated[Path | None, "[FILE]"] = None
    """Print JSON instead of text; with FILE: write it there and print text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(
        parser,
        CheckOptions,
        *("corpus", "store", "folder"),
        defaults={"folder": Path()},
        links_s="--seconds",
        networks="--network",
        expected_gpus="--expect-gpus",
    )
    add_fields(parser, DoctorOptions)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print the report."""
    given, options = fields_of(arguments, CheckOptions), options_of(arguments, DoctorOptions)
    check_seconds("--seconds", given["links_s"])
    check_seconds("--timeout", options.timeout_s)
    for option in ("out", "exclude", "json"):
        if path := getattr(options, option):
            check_folder_of(path, option=f"--{option}")
    if given["store"]:
        from penstock.doctor.checks.object_store import place_of

        place_of(given["store"])  # an invalid address is refused before measuring
    check_processes(options.processes)
    env.silence_torch()
    import penstock.doctor.run_checks  # torch; imported once, before processes fork

    only = _check_names(options.checks, penstock.doctor.run_checks.CHECKS)
    checks = CheckOptions(only=only, **given)

    if options.processes == 1:
        return _examine(checks, options)
    outcome = run_processes(lambda: _examine(checks, options), explain, processes=options.processes)
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


def _examine(checks: CheckOptions, options: DoctorOptions) -> int:
    from penstock.core.files import write_atomic
    from penstock.doctor.cluster import cluster_of
    from penstock.doctor.outliers import hosts_to_leave_out
    from penstock.doctor.report import as_json, as_text
    from penstock.doctor.run_checks import examine
    from penstock.plan.hardware import write

    report = examine(checks, timeout_s=options.timeout_s, on_check=_progress)
    if report is None:
        return 0
    as_lines = json.dumps(as_json(report)) if options.json else ""
    print(as_lines if options.json == _STDOUT else "\n".join(as_text(report)))
    if options.json and options.json != _STDOUT:
        write_atomic(options.json, f"{as_lines}\n")
    if options.out:
        cluster, assumed = cluster_of(report)
        write(cluster, options.out)
        for line in assumed:
            print(f"{options.out}: assumed {line}", file=sys.stderr)
    if options.exclude:
        hosts = hosts_to_leave_out(report.outliers)
        write_atomic(options.exclude, "".join(f"{host}\n" for host in hosts))
    return report.exit_code


def _progress(check: str) -> None:
    if env.ranks().rank == 0 and sys.stderr.isatty():
        print(f"\r\033[Kexamining {check} ...", end="" if check != "links" else "\r\033[K", file=sys.stderr)
