"""`penstock launch kubernetes`: submit a recipe to Kubernetes."""

import argparse
import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated

from penstock.cli import launch_plan
from penstock.cli.launch_plan import LaunchOptions, LaunchPlan, SharedOptions
from penstock.cli.options import add_fields, options_of
from penstock.cli.pods import WORK, add_pod_arguments, check_mounted, fitting_name, pod_spec, tried
from penstock.core.errors import UsageError
from penstock.launch.pods.code import code_config_map, code_of, packed, upload
from penstock.launch.pods.pod import PodCode, PodSpec
from penstock.launch.render.jobset import longest_name
from penstock.launch.render.kubernetes import RECIPE_FILE, pod_of, render_kubernetes
from penstock.launch.render.pod_template import CONFIG
from penstock.launch.spec import RunSpec
from penstock.storage.address import is_remote
from penstock.train.recipe.config import MeasureConfig
from penstock.train.resolve.load import build_for_others

EPILOG = """\
A JobSet (or a TrainJob of Kubeflow Trainer) is submitted, whose pods are the nodes. Relative paths of the
recipe begin in the first volume. The cluster is that of KUBECONFIG; --dry-run needs none, and asks one that
answers whether it would take the run.

example:
  penstock launch kubernetes recipe.toml --image registry/penstock:0.1 --volume runs:/runs --dry-run
  penstock launch kubernetes recipe.toml --image registry/penstock:0.1 --volume runs:/runs --nodes 2:4
  penstock launch kubernetes r.toml --image penstock:0.1 --volume runs:/runs --nodes 4 --networks cards.toml
  penstock launch kubernetes recipe.toml --image registry/penstock:0.1 --volume runs:/runs --code .

exit codes: 0 submitted, 1 the cluster refused, cannot be reached, or the run's folder is in use, 2 wrong
recipe or usage
"""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """Options of the sources of a run."""

    code: Annotated[Path | None, "FOLDER"] = None
    """Sources that are laid over the image."""
    code_store: Annotated[str, "URL"] = ""
    """Object store for sources of more than 1 MiB."""

    def __post_init__(self) -> None:
        if self.code_store and not self.code:
            raise UsageError(
                "--code-store holds the sources of --code, which is missing", got=self.code_store
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    launch_plan.add_arguments(parser)
    add_pod_arguments(parser)
    add_fields(parser, RunSpec, "queue", "time_limit_s", "max_requeues", "ttl_s", "doctor")
    add_fields(parser, PodSpec, "api", "required_topology", "preferred_topology", "network_policy")
    add_fields(parser, CodeOptions)


def run(arguments: argparse.Namespace) -> int:
    """Submit the run, or show it."""
    sources, options = options_of(arguments, CodeOptions), options_of(arguments, SharedOptions)
    archive = packed(sources.code) if sources.code else b""
    code = code_of(archive, store=sources.code_store) if archive else None
    plan = plan_of(arguments, code)
    if plan.spec.networks:
        raise UsageError(
            "--network names interfaces of machines; pods have those of --networks FILE.toml",
            got=plan.spec.networks[0],
        )
    rendered = render_kubernetes(plan.spec)
    namespace = pod_of(plan.spec).namespace
    more = [code_config_map(archive, code, namespace)] if code and not code.address else []
    from penstock.launch.engines import kubernetes
    from penstock.launch.engines.kubernetes_api import connect

    if options.dry_run or options.explain:
        shown = replace(rendered, objects=(*more, *rendered.objects))
        notes = []
        if options.dry_run:
            notes = [tried(namespace, partial(kubernetes.try_run, plan.spec, shown.objects))]
        launch_plan.show(plan, shown, options, notes)
        return 0
    launch_plan.check_free(plan)
    cluster = connect(namespace)
    kubernetes.check_cluster(plan.spec, cluster)
    if code and code.address:
        upload(archive, code)
    name = kubernetes.submit(plan.spec, plan.folder, rendered, cluster, more=more)
    shown_folder = shlex.quote(str(plan.folder.run))
    print(f"submitted {name}: penstock launch status {shown_folder} | penstock launch logs {shown_folder} -f")
    return 0


def plan_of(arguments: argparse.Namespace, code: PodCode | None = None) -> LaunchPlan:
    """Return the launch of the options, checked, as pods see it.

    Raises:
        UsageError: the recipe or an option is wrong.
    """
    plan = launch_plan.planned(
        arguments,
        pod=pod_spec(arguments, code),
        build=build_for_others,
        python="python3",
    )
    return in_pods(plan, is_named=bool(options_of(arguments, LaunchOptions).name))


def in_pods(plan: LaunchPlan, *, is_named: bool) -> LaunchPlan:
    """Return a plan with the paths that pods see, and a name that fits.

    Args:
        is_named: the name was given, and is not changed.

    Raises:
        UsageError: a path is in no volume, so pods would not see it, or lose it.
    """
    spec, config = plan.spec, plan.config
    assert spec.pod is not None
    mounts = [PurePosixPath(volume.path) for volume in spec.pod.volumes]
    begin = mounts[0] if mounts else PurePosixPath(WORK)
    run = begin / config.run.dir
    if not is_remote(config.checkpoint.dir):
        check_mounted(
            "run.dir",
            run,
            mounts,
            fix='Or, with one node, keep checkpoints in a bucket: checkpoint.dir = "s3://...".',
        )
    data = [begin / path for path in map(str, config.data.paths.values()) if not is_remote(path)]
    for path in data:
        check_mounted("data path", path, mounts, fix="Or give the address of a bucket.")
    name = spec.name if is_named else fitting_name(spec.name, longest_name(spec.nodes.most))
    return replace(
        plan,
        spec=replace(
            spec,
            name=name,
            run_dir=str(run),
            work_dir=str(begin) if mounts else "",
            storage=tuple(dict.fromkeys(map(str, data))),
            command=(spec.command[0], f"{CONFIG}/{RECIPE_FILE}", *spec.command[2:]),
            pod=replace(spec.pod, recipe=plan.recipe, open_ports=_open_ports(config.measure)),
        ),
    )


def _open_ports(measure: MeasureConfig) -> tuple[int, ...]:
    """Return the port of metrics, if the recipe opens it to other machines."""
    is_open = measure.metrics_port and measure.metrics_host not in _LOOPBACK
    return (measure.metrics_port,) if is_open else ()
