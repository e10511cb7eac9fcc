"""`penstock launch server`: deploy a server on Kubernetes."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, NoReturn

from penstock.cli.launch_plan import SharedOptions
from penstock.cli.options import Positional, add_fields, fields_of, options_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """Options from which fields of `ServingSpec` are made."""

    model: Annotated[Path, Positional("MODEL")]
    """Folder of the model, in a volume of the pods."""
    name: str = ""
    """Name of the server. Empty: the folder's."""
    server: Annotated[tuple[str, ...], "=OPTION"] = ()
    """An option of `penstock serve`, such as --server=--insecure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, DeployOptions, "model", "name")
    add_fields(
        parser,
        ServingSpec,
        *("grace_s", "port", "startup_s"),
        devices="--processes",
        waiting_per_pod="--waiting",
        is_kserve="--kserve",
    )
    add_fields(parser, DeployOptions, "server")
    add_pod_arguments(parser)
    add_fields(parser, SharedOptions)


def run(arguments: argparse.Namespace) -> int:
    """Deploy the server, or show it."""
    pod, given = pod_spec(arguments), options_of(arguments, DeployOptions)
    options = options_of(arguments, SharedOptions)
    model = str(PurePosixPath(pod.volumes[0].path if pod.volumes else WORK) / given.model)
    mounts = [PurePosixPath(volume.path) for volume in pod.volumes]
    check_mounted("model", PurePosixPath(model), mounts, fix="Relative paths begin in the first one.")
    spec = ServingSpec(
        name=given.name or fitting_name(given.model.name, _LONGEST_NAME),
        model=model,
        python="python3",
        pod=pod,
        replicas=node_range(options.nodes),
        options=_server_options(given.server, secrets=options.secret),
        environment=environment_of(options.env),
        secrets=secrets_of(options.secret),
        **fields_of(arguments, ServingSpec),
    )
    rendered = render_serving(spec)
    from penstock.launch.engines import kubernetes
    from penstock.launch.engines.kubernetes_api import connect

    if options.dry_run or options.explain:
        if options.json:
            settings = [asdict(setting) for setting in rendered.settings]
            print(json.dumps({"objects": list(rendered.objects), "settings": settings}))
            return 0
        if options.dry_run:
            print(rendered.as_text())
            print(f"\ndevices: {spec.replicas} x {spec.devices} {pod.device or 'CPU'}")
            print(f"grace: {spec.grace_s:g} s: open answers end within {spec.drain_s:g} s")
            said = tried(pod.namespace, partial(kubernetes.try_objects, rendered.objects))
            print(f"note: {said}")
        for setting in rendered.settings if options.explain else ():
            print(setting)
        return 0
    cluster = connect(pod.namespace)
    kubernetes.deploy(rendered.objects, cluster)
    label = f"app.kubernetes.io/instance={spec.name}"
    print(f"deployed {spec.name}: kubectl -n {pod.namespace} get pods -l {label}")
    return 0


def _server_options(options: tuple[str, ...], *, secrets: Sequence[str]) -> tuple[str, ...]:
    """Return the options of the server.

    Raises:
        UsageError: it would not start: with an option that it does not know, or with neither a key nor the
            permission to do without.
    """
    from penstock.cli import serve

    check_no_secret_in(options, where="--server")
    known = _OptionParser(add_help=False)
    serve.add_arguments(known)
    known.parse_args(["model", *options])
    named = {option.partition("=")[0] for option in options}
    keys = {secret.partition("=")[0] for secret in secrets}
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
