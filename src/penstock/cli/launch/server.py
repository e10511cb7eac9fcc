"""`penstock launch server`: deploy a server on Kubernetes."""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NoReturn

from penstock.cli import launch_plan
from penstock.cli.options import add_fields, fields_of
from penstock.cli.pods import WORK, add_pod_arguments, check_mounted, fitting_name, pod_spec, tried
from penstock.core.errors import UsageError
from penstock.launch.render.serving import render_serving
from penstock.launch.serving import ServingSpec
from penstock.launch.spec import check_no_secret_in, environment_of, node_range, secrets_of

EPILOG = """\
A Deployment with a Service (or an InferenceService of KServe) is made, whose pods type `penstock serve`. A
relative path of the model begins in the first volume. The cluster is that of KUBECONFIG; --dry-run needs
none, and asks one that answers whether it would take the objects.

example:
  penstock launch server models/a --image penstock:0.1 --volume m:/m --secret PENSTOCK_API_KEY=key:a/b
  penstock launch server models/a --image penstock:0.1 --volume m:/m --server=--insecure --nodes 1:4

exit codes: 0 deployed, 1 the cluster refused or cannot be reached, 2 wrong usage
"""

_LONGEST_NAME = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of the model, in a volume of the pods"
    )
    parser.add_argument(
        "--name", default="", metavar="TEXT", help="name of the server; default: the folder's"
    )
    add_fields(
        parser,
        ServingSpec,
        *("grace_s", "port", "startup_s"),
        devices="--processes",
        waiting_per_pod="--waiting",
        is_kserve="--kserve",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="=OPTION",
        help="an option of `penstock serve`, such as --server=--insecure; may be repeated",
    )
    add_pod_arguments(parser)
    launch_plan.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    """Deploy the server, or show it."""
    pod = pod_spec(arguments)
    model = str(PurePosixPath(pod.volumes[0].path if pod.volumes else WORK) / arguments.model)
    mounts = [PurePosixPath(volume.path) for volume in pod.volumes]
    check_mounted("model", PurePosixPath(model), mounts, fix="Relative paths begin in the first one.")
    spec = ServingSpec(
        name=arguments.name or fitting_name(arguments.model.name, _LONGEST_NAME),
        model=model,
        python="python3",
        pod=pod,
        replicas=node_range(arguments.nodes),
        options=_server_options(arguments),
        environment=environment_of(arguments.env),
        secrets=secrets_of(arguments.secret),
        **fields_of(arguments, ServingSpec),
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
            said = tried(pod.namespace, partial(kubernetes.try_objects, rendered.objects))
            print(f"note: {said}")
        for setting in rendered.settings if arguments.explain else ():
            print(setting)
        return 0
    cluster = connect(pod.namespace)
    kubernetes.deploy(rendered.objects, cluster)
    label = f"app.kubernetes.io/instance={spec.name}"
    print(f"deployed {spec.name}: kubectl -n {pod.namespace} get pods -l {label}")
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
