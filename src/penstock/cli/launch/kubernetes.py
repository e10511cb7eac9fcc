"""`penstock launch kubernetes`: submit a recipe to Kubernetes."""

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

from penstock.cli import launch_plan
from penstock.cli.launch.slurm import seconds
from penstock.cli.launch_plan import LaunchPlan
from penstock.core import config as configs
from penstock.core.errors import UsageError
from penstock.launch.pod import NETWORK_POLICIES, PodCode, PodSpec, PodVolume
from penstock.launch.pod_code import code_config_map, code_of, packed, upload
from penstock.launch.pod_networks import PodNetworks
from penstock.launch.render.jobset import longest_name
from penstock.launch.render.kubernetes import RECIPE_FILE, is_inside, render_kubernetes
from penstock.launch.render.pod_template import CONFIG
from penstock.launch.render.serving import render_serving
from penstock.launch.serving import ServingSpec
from penstock.launch.spec import check_no_secret_in, environment_of, node_range, secrets_of
from penstock.storage.address import is_remote
from penstock.train.recipe.config import MeasureConfig
from penstock.train.recipe.load import build_for_others

if TYPE_CHECKING:
    from penstock.launch.engines.kubernetes_api import ClusterConnection

EPILOG = """\
A JobSet (or a TrainJob of Kubeflow Trainer) is submitted, whose pods are the nodes. Relative paths of the
recipe begin in the first volume. The cluster is that of KUBECONFIG; --dry-run needs none, and asks one that
answers whether it would take the run.

example:
  penstock launch kubernetes recipe.toml --image registry/penstock:0.1 --volume runs:/runs --dry-run
  penstock launch kubernetes recipe.toml --image registry/penstock:0.1 --volume runs:/runs --nodes 2:4
  penstock launch kubernetes r.toml --image penstock:0.1 --volume runs:/runs --nodes 4 --networks cards.toml
  penstock launch kubernetes recipe.toml --image registry/penstock:0.1 --volume runs:/runs --code .
  penstock launch kubernetes models/a --serve --image penstock --volume m:/m --secret PENSTOCK_API_KEY=key:a/b

exit codes: 0 submitted, 1 the cluster refused, cannot be reached, or the run's folder is in use, 2 wrong
recipe or usage
"""

_WORK = "/tmp/work"
_SERVER_NAME = 50
_OF_RUNS = (
    *("set", "network", "idle_starts", "cluster", "api", "queue", "required_topology", "preferred_topology"),
    *("time_limit", "max_requeues", "doctor", "code", "code_store", "network_policy"),
)
_OF_SERVERS = ("port", "waiting", "startup", "server")
"""Options that the other kind of launch would not look at."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    launch_plan.add_arguments(parser)
    add = parser.add_argument
    add("--image", default="", metavar="NAME", help="container image with Penstock and torch")
    add("--namespace", default="default", metavar="NAME", help="namespace of the job; default: default")
    add("--api", choices=("jobset", "trainjob"), default="jobset", help="kind of the job; default: jobset")
    add(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="PersistentVolumeClaim, and where pods have it; may be repeated",
    )
    add("--queue", default="", metavar="NAME", help="LocalQueue of Kueue; not for servers")
    add(
        "--time-limit",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="longest time of one start, such as 90m or 24h; default: none",
    )
    add(
        "--max-requeues",
        type=int,
        default=100,
        metavar="N",
        help="times that all pods start again at the time limit; default: 100",
    )
    add(
        "--device",
        default="",
        metavar="RESOURCE",
        help="resource of which each process gets one, such as nvidia.com/gpu; default: none",
    )
    add("--cpu", default="", metavar="CORES", help="cores of a pod; default: the cluster's")
    add("--memory", default="", metavar="SIZE", help="memory of a pod, such as 64Gi; default: the cluster's")
    add(
        "--cache",
        default="50Gi",
        metavar="SIZE",
        help="disk of the node that holds parts of remote corpora; default: 50Gi",
    )
    add("--shared-memory", default="8Gi", metavar="SIZE", help="size of /dev/shm; default: 8Gi")
    add("--fs-group", type=int, metavar="ID", help="group of volumes; default: the cluster's")
    add("--service-account", default="", metavar="NAME", help="service account of the pods")
    add("--priority-class", default="", metavar="NAME", help="priority class of the pods")
    add(
        "--node-selector",
        action="append",
        default=[],
        metavar="LABEL=VALUE",
        help="only nodes with this label get pods",
    )
    add("--exclude-node", action="append", default=[], metavar="NAME", help="node that gets no pod")
    add(
        "--required-topology",
        default="",
        metavar="LABEL",
        help="Kueue: label of a domain, such as a rack, that must hold all pods",
    )
    add("--preferred-topology", default="", metavar="LABEL", help="Kueue: the same, where it is possible")
    add("--code", type=Path, metavar="FOLDER", help="sources that are laid over the image")
    add("--code-store", default="", metavar="URL", help="object store for sources of more than 1 MiB")
    add(
        "--doctor",
        choices=("report", "require", "skip"),
        default="skip",
        help="examine the pods together before the first start, a fixed number of them; require: end at a "
        "red line; default: skip",
    )
    add("--serve", action="store_true", help="serve a model: give its folder instead of a recipe")
    add("--kserve", action="store_true", help="with --serve: an InferenceService of KServe")
    add("--port", type=int, default=8000, metavar="N", help="with --serve: port of the server; default: 8000")
    add(
        "--waiting",
        type=int,
        default=4,
        metavar="N",
        help="with --serve and --nodes MIN:MAX: queued answers per pod before another pod starts; default: 4",
    )
    add(
        "--startup",
        type=seconds,
        default=1800.0,
        metavar="TIME",
        help="with --serve: longest time to load the model; default: 30m",
    )
    add(
        "--server",
        action="append",
        default=[],
        metavar="=OPTION",
        help="with --serve: an option of `penstock serve`, such as --server=--insecure; may be repeated",
    )
    add("--networks", type=Path, metavar="FILE.toml", help="network cards of the pods")
    add(
        "--network-policy",
        choices=NETWORK_POLICIES,
        default="run",
        help="run: only the run's pods reach its pods, but for the port of metrics; none: make no "
        "NetworkPolicy, for instance because you have no right to; default: run",
    )


def run(arguments: argparse.Namespace) -> int:
    """Submit the run, or show it."""
    if arguments.serve or arguments.kserve:
        _refuse(
            arguments,
            _OF_RUNS,
            what="a run that trains, and a server is to be deployed",
            fix="Leave it out: pods of a server wait in no queue, and run the code of their image.",
        )
        return _serve(arguments)
    _refuse(
        arguments,
        _OF_SERVERS,
        what="a server, and a run is to be submitted",
        fix="Give --serve, or leave it out.",
    )
    if arguments.code_store and not arguments.code:
        raise UsageError(
            "--code-store holds the sources of --code, which is missing", got=arguments.code_store
        )
    archive = packed(arguments.code) if arguments.code else b""
    code = code_of(archive, store=arguments.code_store) if archive else None
    plan = plan_of(arguments, code)
    if arguments.network:
        raise UsageError(
            "--network names interfaces of machines; pods have those of --networks FILE.toml",
            got=arguments.network[0],
        )
    rendered = render_kubernetes(plan.spec)
    more = [code_config_map(archive, code, arguments.namespace)] if code and not code.address else []
    from penstock.launch.engines import kubernetes
    from penstock.launch.engines.kubernetes_api import connect

    if arguments.dry_run or arguments.explain:
        shown = replace(rendered, objects=(*more, *rendered.objects))
        notes = []
        if arguments.dry_run:
            notes = [_tried(arguments.namespace, partial(kubernetes.try_run, plan.spec, shown.objects))]
        launch_plan.show(plan, shown, arguments, notes)
        return 0
    launch_plan.check_free(plan)
    cluster = connect(arguments.namespace)
    kubernetes.check_cluster(plan.spec, cluster)
    if code and code.address:
        upload(archive, code)
    name = kubernetes.submit(plan.spec, plan.folder, rendered, cluster, more=more)
    shown_folder = plan.folder.run
    print(f"submitted {name}: penstock launch status {shown_folder} | penstock launch logs {shown_folder} -f")
    return 0


def _refuse(arguments: argparse.Namespace, names: Sequence[str], *, what: str, fix: str) -> None:
    """Refuse options that are not at their default.

    Raises:
        UsageError: the message names one.
    """
    defaults = argparse.ArgumentParser()
    add_arguments(defaults)
    for name in names:
        if getattr(arguments, name) != defaults.get_default(name):
            raise UsageError(f"--{name.replace('_', '-')} is for {what}", fix=fix)


def _serve(arguments: argparse.Namespace) -> int:
    """Deploy a server, or show it."""
    pod = pod_spec(arguments, None)
    model = str(PurePosixPath(pod.volumes[0].path if pod.volumes else _WORK) / arguments.recipe)
    mounts = [PurePosixPath(volume.path) for volume in pod.volumes]
    _check_mounted("model", PurePosixPath(model), mounts, fix="Relative paths begin in the first one.")
    spec = ServingSpec(
        name=arguments.name or fitting_name(arguments.recipe.name, _SERVER_NAME),
        model=model,
        python="python3",
        pod=pod,
        replicas=node_range(arguments.nodes),
        options=_server_options(arguments),
        environment=environment_of(arguments.env),
        secrets=secrets_of(arguments.secret),
        devices=1 if arguments.processes is None else arguments.processes,
        grace_s=arguments.grace,
        startup_s=arguments.startup,
        port=arguments.port,
        waiting_per_pod=arguments.waiting,
        is_kserve=arguments.kserve,
    )
    rendered = render_serving(spec)
    from penstock.launch.engines import kubernetes
    from penstock.launch.engines.kubernetes_api import connect

    if arguments.dry_run or arguments.explain:
        if arguments.json:
            settings = [asdict(setting) for setting in rendered.settings]
            print(json.dumps({"objects": list(rendered.objects), "settings": settings}))
            return 0
        if arguments.dry_run:
            print(rendered.as_text())
            print(f"\ndevices: {spec.replicas} x {spec.devices} {pod.device or 'CPU'}")
            print(f"grace: {spec.grace_s:g} s: open answers end within {spec.drain_s:g} s")
            tried = _tried(arguments.namespace, partial(kubernetes.try_objects, rendered.objects))
            print(f"note: {tried}")
        for setting in rendered.settings if arguments.explain else ():
            print(setting)
        return 0
    cluster = connect(arguments.namespace)
    kubernetes.deploy(rendered.objects, cluster)
    label = f"app.kubernetes.io/instance={spec.name}"
    print(f"deployed {spec.name}: kubectl -n {arguments.namespace} get pods -l {label}")
    return 0


def _server_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the options of the server.

    Raises:
        UsageError: it would not start: with an option that it does not know, or with neither a key nor the
            permission to do without.
    """
    from penstock.cli import serve

    options = tuple(arguments.server)
    check_no_secret_in(options, where="--server")
    known = _OptionParser(add_help=False)
    serve.add_arguments(known)
    known.parse_args(["model", *options])
    named = {option.partition("=")[0] for option in options}
    keys = {secret.partition("=")[0] for secret in arguments.secret}
    if not ({"--insecure", "--api-keys"} & named or "PENSTOCK_API_KEY" in keys):
        raise UsageError(
            "A server that other machines reach needs a key",
            fix="Give --secret PENSTOCK_API_KEY=key:NAME/KEY, or --server=--insecure behind a gateway that "
            "checks keys.",
        )
    return options


class _OptionParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"--server takes options of `penstock serve`: {message}")


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
        queue=arguments.queue,
        time_limit_s=arguments.time_limit,
        max_requeues=arguments.max_requeues,
        doctor=arguments.doctor,
    )
    return in_pods(plan, is_named=bool(arguments.name))


def _tried(namespace: str, ask: Callable[["ClusterConnection"], str]) -> str:
    """Return what a cluster says of a launch, if one is configured and answers.

    Raises:
        PenstockError: it would refuse the launch.
    """
    from penstock.core.errors import PenstockError
    from penstock.launch.engines.kubernetes_api import connect

    try:
        cluster = connect(namespace)
        cluster.all("v1", "ConfigMap")
    except PenstockError as error:
        return f"no cluster tried these objects: {error}"
    return ask(cluster)


def pod_spec(arguments: argparse.Namespace, code: PodCode | None) -> PodSpec:
    """Return the pods of the options.

    Raises:
        UsageError: an option is wrong.
    """
    networks = None
    if arguments.networks:
        raw = configs.load_toml(arguments.networks, what="The file of networks")
        networks = configs.build(PodNetworks, raw)
    return PodSpec(
        image=arguments.image,
        namespace=arguments.namespace,
        api=arguments.api,
        volumes=tuple(map(_volume, arguments.volume)),
        cache=arguments.cache,
        shared_memory=arguments.shared_memory,
        device=arguments.device,
        cpu=arguments.cpu,
        memory=arguments.memory,
        fs_group=arguments.fs_group,
        service_account=arguments.service_account,
        priority_class=arguments.priority_class,
        node_selector=tuple(map(_label, arguments.node_selector)),
        excluded_nodes=tuple(arguments.exclude_node),
        required_topology=arguments.required_topology,
        preferred_topology=arguments.preferred_topology,
        code=code,
        network_provider=networks.provider if networks else "nad",
        networks=networks.networks if networks else (),
        network_policy=arguments.network_policy,
    )


def _volume(text: str) -> PodVolume:
    claim, colon, path = text.partition(":")
    if not colon:
        raise UsageError("--volume takes CLAIM:PATH", got=text, fix="Example: --volume runs:/runs.")
    return PodVolume(claim=claim, path=path.rstrip("/") or path)


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError("--node-selector takes LABEL=VALUE", got=text)
    return name, value


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
    begin = mounts[0] if mounts else PurePosixPath(_WORK)
    run = begin / config.run.dir
    if not is_remote(config.checkpoint.dir):
        _check_mounted(
            "run.dir",
            run,
            mounts,
            fix='Or, with one node, keep checkpoints in a bucket: checkpoint.dir = "s3://...".',
        )
    data = [begin / path for path in map(str, config.data.paths.values()) if not is_remote(path)]
    for path in data:
        _check_mounted("data path", path, mounts, fix="Or give the address of a bucket.")
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


def _check_mounted(what: str, path: PurePosixPath, mounts: list[PurePosixPath], *, fix: str) -> None:
    if not any(is_inside(path, mount) for mount in mounts):
        known = ", ".join(map(str, mounts)) or "none"
        raise UsageError(
            f"The {what} is in no volume of the pods ({known}), and is lost with a pod",
            got=str(path),
            fix=f"Mount a claim: --volume CLAIM:PATH. {fix}",
        )


def fitting_name(text: str, longest: int) -> str:
    """Return a name of an object made of another text; a shortened one ends with a hash of the whole.

    >>> fitting_name("My_run.1", 48), fitting_name("7b-on-web", 48), fitting_name("a" * 30, 20)
    ('my-run-1', 'run-7b-on-web', 'aaaaaaaaaaaaa-e8921a')
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".rstrip("-")
    if len(name) <= longest:
        return name
    digest = hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
    return f"{name[: longest - 7].rstrip('-')}-{digest}"
