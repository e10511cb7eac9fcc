"""A launch as it was asked for: options -> specification, its checks, and what --dry-run prints."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from penstock.checkpoint.find import saved_of
from penstock.checkpoint.layout import INDEX_FILE
from penstock.cli.options import (
    RecipeOptions,
    add_fields,
    add_recipe_settings,
    fields_of,
    options_of,
    recipe_settings,
)
from penstock.core.config import Raw
from penstock.core.errors import ConfigError, PenstockError, RunLocked, UsageError
from penstock.core.toml import toml_text
from penstock.core.units import plural
from penstock.launch.engines.engine import ENGINES
from penstock.launch.job_folder import JobFolder
from penstock.launch.pod_networks import declared
from penstock.launch.render.rendered import Rendered, ceiling
from penstock.launch.spec import (
    RunSpec,
    check_grace,
    check_no_secret,
    environment_of,
    node_range,
    secrets_of,
)
from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.sinks.jsonl import read_records
from penstock.plan.hardware import Cluster, cluster_of
from penstock.train.control.requests import job_is_running
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import check_batch, check_rows, num_data_ranks
from penstock.train.resolve.load import build_recipe, check_command, read_recipe

_RECENT_STEPS = 200
_SHOWN_SIZES = 8
RECIPE_FILE = "recipe.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch that passed its checks."""

    spec: RunSpec
    folder: JobFolder
    recipe: str
    """Text of the frozen recipe."""
    config: TrainConfig
    cluster: Cluster | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of a launch from which fields of `RunSpec` are made."""

    oversubscribe: bool = False
    """Start more than 4 processes on a core, or more than fits into the memory."""
    processes: int | None = None
    """Processes of a node. None: the cluster file's devices, or 1."""
    name: str = ""
    """Name of the job. Empty: the run's folder."""
    cluster: Annotated[str, "NAME|FILE.toml"] = ""
    """Machines and their price; see `penstock plan`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """Options that jobs and servers share."""

    nodes: Annotated[str, "N|MIN:MAX"] = "1"
    """Nodes; MIN:MAX: nodes may come and go."""
    env: Annotated[tuple[str, ...], "NAME=VALUE"] = ()
    """Variable of every process."""
    secret: Annotated[tuple[str, ...], "NAME=file:PATH|env:NAME|key:SECRET/KEY"] = ()
    """Variable whose value is read from a file on each node, handed on from this shell (not on Kubernetes),
    or that of a Secret of Kubernetes."""
    dry_run: bool = False
    """Print every file and command, and the ceiling of costs; start nothing."""
    explain: bool = False
    """Print each setting with its reason; start nothing."""
    json: bool = False
    """With --dry-run or --explain: print JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that all engines share."""
    add_fields(parser, RecipeOptions, "recipe")
    add_recipe_settings(parser)
    add_fields(parser, LaunchOptions)
    add_fields(parser, RunSpec, "grace_s", "idle_starts", networks="--network")
    add_fields(parser, SharedOptions)


def planned(arguments: argparse.Namespace, **of_engine: Any) -> LaunchPlan:  # Any: fields of RunSpec
    """Return the launch of the options, checked; nothing is written.

    Args:
        of_engine: fields of the specification that follow from the engine, and `build`, which makes a recipe
            of its values.

    Raises:
        UsageError: the recipe or an option is wrong.
    """
    recipe, options = options_of(arguments, RecipeOptions).recipe, options_of(arguments, LaunchOptions)
    shared = options_of(arguments, SharedOptions)
    raw = read_recipe(recipe, recipe_settings(arguments))
    check_no_secret(raw, where=f"The recipe {recipe}")
    tunes = "tune" in raw
    check_command(raw, tunes=tunes)
    build: Callable[[Raw], TrainConfig] = of_engine.pop("build", build_recipe)
    config = build(raw)
    cluster = cluster_of(options.cluster) if options.cluster else None
    devices = cluster.devices_per_node if cluster else 1
    run = Path(config.run.dir).absolute()
    folder = JobFolder(run)
    spec = RunSpec(
        name=_job_name(options.name or run.name),
        command=(
            "tune" if tunes else "train",
            str(folder.path / RECIPE_FILE),
            *(["--oversubscribe"] if options.oversubscribe else []),
        ),
        run_dir=str(run),
        work_dir=str(Path.cwd()),
        python=of_engine.pop("python", sys.executable),
        environment=environment_of(shared.env),
        secrets=secrets_of(shared.secret),
        nodes=node_range(shared.nodes),
        processes=devices if options.processes is None else options.processes,
        storage=_folders(config),
        **fields_of(arguments, RunSpec),
        **of_engine,
    )
    _check_cluster(spec, cluster)
    check_sizes(spec, config)
    check_grace(spec.grace_s, **measured(run))
    frozen = _with_price(_with_deadline(raw, config, spec), config, cluster)
    return LaunchPlan(
        spec=spec, folder=folder, recipe=toml_text(frozen) + "\n", config=config, cluster=cluster
    )


def check_free(plan: LaunchPlan) -> None:
    """Refuse a run folder that another job uses.

    Raises:
        RunLocked: the message names the job.
    """
    folder, fix = plan.folder, "Wait for it, stop it (penstock launch cancel), or choose another run.dir."
    if folder.has_job():
        job = folder.job()
        try:
            state = ENGINES[job.engine].state(job, folder)
        except PenstockError as error:
            raise RunLocked(
                f"{folder.run} belongs to job {job.ident} of {job.engine}; {error}", fix=fix
            ) from None
        if state.is_live:
            raise RunLocked(
                f"{folder.run} is in use by job {job.ident} of {job.engine}, {state.status} ({state.reason})",
                fix=fix,
            )
    if job_is_running(folder.run):
        raise RunLocked(f"{folder.run} is being trained by another process", fix=fix)


def check_sizes(spec: RunSpec, config: TrainConfig, *, step: int = 0, batch_size: int | None = None) -> None:
    """Refuse a recipe that cannot run on every number of nodes of the range.

    Args:
        step: steps taken.
        batch_size: rows of a step that a request has set; None: the recipe's.

    Raises:
        ConfigError: the message has the first number that fails, and those that do not.
    """
    first: ConfigError | None = None
    failing, fitting = [], []
    for nodes in range(spec.nodes.least, spec.nodes.most + 1):
        ranks = nodes * spec.processes
        try:
            num_data = num_data_ranks(config, world_size=ranks, ranks_per_machine=spec.processes)
            check_rows(config, world_size=num_data)
            if batch_size is not None:
                check_batch(config, batch_size, step=step, world_size=num_data)
        except ConfigError as error:
            first = first or error
            failing.append(nodes)
        else:
            fitting.append(nodes)
    if first is None:
        return
    if not spec.nodes.is_elastic:
        raise first
    shown = ", ".join(map(str, fitting[:_SHOWN_SIZES])) or "none"
    raise ConfigError(
        f"The run may shrink or grow to {plural(failing[0], 'node')} of "
        f"{plural(spec.processes, 'process')}, on which the recipe cannot run: {first}",
        fix=f"Sizes of --nodes {spec.nodes} that would do: {shown}. Choose a batch that every size divides, "
        "or a range without the others.",
    )


def measured(run: Path) -> dict[str, float]:
    """Return the longest step and save of the run so far, in seconds; 0: not measured."""
    step_s = save_s = 0.0
    if (run / METRICS_FILE).is_file():
        records = [r for r in read_records(run / METRICS_FILE) if "step_s" in r][-_RECENT_STEPS:]
        step_s = max((float(record["step_s"]) for record in records), default=0.0)
        save_s = max((float(record.get("checkpoint_s", 0.0)) for record in records), default=0.0)
    if (run / "config.json").is_file():
        save_s = max([save_s, *_save_seconds(run)])
    return {"step_s": step_s, "save_s": save_s}


def _save_seconds(run: Path) -> list[float]:
    """Return how long the kept checkpoints took, from their beginning to their index, in whole seconds."""
    from datetime import datetime

    found = []
    try:
        for saved in saved_of(run):
            index = run / "checkpoints" / saved.name / INDEX_FILE
            if index.is_file():
                began = datetime.fromisoformat(saved.index().meta.saved_at).timestamp()
                found.append(max(0.0, index.stat().st_mtime - began - 1.0))
    except (PenstockError, OSError, ValueError):
        return []
    return found


def _check_cluster(spec: RunSpec, cluster: Cluster | None) -> None:
    if cluster is None:
        return
    if spec.nodes.least > cluster.nodes:
        raise UsageError(
            f"The cluster has {cluster.nodes} nodes, so the run could never start",
            got=f"--nodes {spec.nodes}",
            fix=f"Ask for at most {cluster.nodes}, or correct the cluster file.",
        )
    if spec.processes > cluster.devices_per_node:
        raise UsageError(
            f"A node of the cluster has {cluster.devices_per_node} devices",
            got=f"--processes {spec.processes}",
            fix="One process uses one device: ask for fewer, or correct the cluster file.",
        )


def _with_deadline(raw: Raw, config: TrainConfig, spec: RunSpec) -> Raw:
    """Return the recipe with the deadline of a save that follows from the grace."""
    own = config.guard.stop_within_s
    if own > spec.grace_s:
        raise UsageError(
            f"The recipe takes guard.stop_within_s = {own:g} s to stop, longer than the grace of "
            f"{spec.grace_s:g} s",
            fix=f"Raise --grace above {own:g}, or leave the key out: it then follows from the grace.",
        )
    if own:
        return raw
    return {**raw, "guard": {**raw.get("guard", {}), "stop_within_s": spec.save_within_s}}


def _with_price(raw: Raw, config: TrainConfig, cluster: Cluster | None) -> Raw:
    """Return the recipe with the cluster file's price, so that the run's record tells what it costs."""
    if cluster is None or not cluster.price_per_node_hour or config.run.device_hour_price:
        return raw
    price = cluster.price_per_node_hour / cluster.devices_per_node
    return {**raw, "run": {**raw.get("run", {}), "device_hour_price": price}}


def _folders(config: TrainConfig) -> tuple[str, ...]:
    found = [str(Path(path).absolute()) for path in config.data.paths.values() if ":" not in str(path)]
    return tuple(dict.fromkeys(found))


def _job_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")[:60] or "penstock"


def show(
    plan: LaunchPlan,
    rendered: Rendered,
    options: SharedOptions,
    notes: Sequence[str] = (),
    *,
    limit_s: float = 0.0,
) -> None:
    """Print what would be done, with --dry-run and --explain.

    Args:
        limit_s: seconds after which the engine ends a start that has no time limit of its own; 0: not known.
    """
    cluster, spec = plan.cluster, plan.spec
    costs = ceiling(
        nodes=spec.nodes.most,
        devices_per_node=spec.processes,
        seconds=spec.time_limit_s or limit_s,
        price_per_node_hour=cluster.price_per_node_hour if cluster else 0.0,
        max_requeues=spec.max_requeues,
    )
    device = cluster.device.name if cluster else "device"
    devices = f"{spec.nodes} x {spec.processes} {device}"
    if options.json:
        values = {
            "spec": spec.as_json(),
            "files": files_of(plan, rendered),
            "commands": [list(command) for command in rendered.commands],
            "objects": list(rendered.objects),
            "settings": [asdict(setting) for setting in rendered.settings],
            "devices": devices,
            "ceiling": list(costs),
            "networks": _networks(spec),
            "grace": _grace(spec),
            "notes": list(notes),
        }
        print(json.dumps(values, indent=1))
        return
    if options.dry_run:
        print(replace(rendered, files=files_of(plan, rendered)).as_text())
        print(f"\ndevices: {devices}")
        for line in costs:
            print(f"ceiling: {line}")
        print(f"networks: {_networks(spec)}")
        print(f"grace: {_grace(spec)}")
        for line in notes:
            print(f"note: {line}")
    if options.explain:
        if options.dry_run:
            print()
        for setting in rendered.settings:
            print(str(setting) if setting.value else f"{setting.name}  # {setting.reason}")


def files_of(plan: LaunchPlan, rendered: Rendered) -> dict[str, str]:
    """Return the files of a launch; those of pods are in its objects."""
    if rendered.objects:
        return dict(rendered.files)
    return {plan.spec.command[1]: plan.recipe, **rendered.files}


def _networks(spec: RunSpec) -> str:
    """Return the networks of a run as text."""
    if spec.pod is not None and spec.pod.networks:
        pod = spec.pod
        cards = declared(pod.network_provider, pod.networks)
        return f"{', '.join(map(str, cards))} by {pod.network_provider}, besides the cluster's own"
    if spec.pod is not None:
        return "the cluster's own"
    return ", ".join(spec.networks) or "those that each node finds"


def _grace(spec: RunSpec) -> str:
    """Return what has to fit into the grace, as text."""
    return f"{spec.grace_s:g} s: a step and a save within {spec.save_within_s:g} s, then exits"
