"""Run the TrainingRuns of a Kubernetes namespace: start, watch, resize and stop their jobs.

example:
  kubectl apply -k deploy/operator
  penstock operator --namespace penstock

A TrainingRun has the options of `penstock launch kubernetes` as fields, and the text of its recipe; its jobs
are rendered by the same code. Replicas of the operator elect a leader by a Lease.

exit codes: 0 stopped by a signal, 1 the lease was lost or the cluster cannot be reached, 2 wrong usage
"""

import argparse
import json
import logging
import re
import secrets
import socket
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from penstock.cli.launch import kubernetes
from penstock.cli.options import add_fields, options_of
from penstock.core import env
from penstock.core.checks import check_seconds
from penstock.core.errors import PenstockError, UsageError
from penstock.core.log import EventLog
from penstock.core.toml import toml_text

METRICS_PORT = 9400
"""Port of the first rank's metrics, unless the recipe has another."""
_log = EventLog("penstock.operator")
_OPTIONS = (
    *("api", "cache", "cpu", "device", "doctor", "fsGroup", "grace", "idleStarts", "image", "maxRequeues"),
    *("memory", "networkPolicy", "nodes", "preferredTopology", "priorityClass", "processes", "queue"),
    *("requiredTopology", "serviceAccount", "sharedMemory", "timeLimit"),
)
"""Fields of a TrainingRun's `spec` that are options of `penstock launch kubernetes`."""
_FLAGS = ("oversubscribe",)
"""The same, of fields that are true or false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """Options of the operator."""

    namespace: Annotated[str, "NAME"] = ""
    """Namespace to watch. Empty: $PENSTOCK_NAMESPACE."""
    every_s: float = 5.0
    """Time between two reconciliations of a run."""
    lease_s: float = 15.0
    """Time until another replica takes over from one that is gone."""

    def __post_init__(self) -> None:
        check_seconds("--every", self.every_s, least=0.1)
        check_seconds("--lease", self.lease_s, least=1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, OperatorOptions)


def run(arguments: argparse.Namespace) -> int:
    """Run until a signal."""
    options = options_of(arguments, OperatorOptions)
    namespace = options.namespace or env.variable("PENSTOCK_NAMESPACE")
    if not namespace:
        raise UsageError("The operator needs a namespace", fix="Give --namespace, or set PENSTOCK_NAMESPACE.")
    from penstock.launch.controller.operator_loop import run_operator

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return run_operator(
        namespace,
        plan_of,
        identity=env.variable("PENSTOCK_POD") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
        every_s=options.every_s,
        lease_s=options.lease_s,
    )


def plan_of(run: Mapping[str, Any], excluded: Sequence[str]) -> Any:  # Any: JSON; RunPlan
    """Return what a TrainingRun asks for.

    Args:
        excluded: nodes that the operator excluded.

    Raises:
        PenstockError: the recipe or a field is wrong; the message has the option of its name.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _plan_in(Path(folder), run, excluded)
        except Exception as error:  # whatever a recipe makes our code raise concerns this run only
            # The folder has another name each time, and tells the user nothing.
            said = str(error).replace(f"{folder}/", "").replace(folder, "its folder")
            if isinstance(error, PenstockError):
                raise PenstockError(said) from None
            _log.warning(
                "run_unread",
                "The specification of run {run} cannot be read",
                run=run["metadata"]["name"],
                exc_info=True,
            )
            raise PenstockError(f"The specification cannot be read: {type(error).__name__}: {said}") from None


def _plan_in(folder: Path, run: Mapping[str, Any], excluded: Sequence[str]) -> Any:  # Any: JSON; RunPlan
    from penstock.launch.controller.reconcile import RunPlan

    spec, meta = run["spec"], run["metadata"]
    recipe = folder / "recipe.toml"
    recipe.write_text(spec["recipe"], encoding="utf-8")
    words = [str(recipe), f"--name={meta['name']}", f"--namespace={meta['namespace']}"]
    words += words_of(spec, excluded)
    if networks := spec.get("networks"):
        file = folder / "networks.toml"
        file.write_text(toml_text({"networks": networks, "provider": spec.get("networkProvider", "nad")}))
        words.append(f"--networks={file}")
    if "podPatch" in spec:
        file = folder / "podPatch.json"
        file.write_text(json.dumps(spec["podPatch"], ensure_ascii=False), encoding="utf-8")
        words.append(f"--pod-patch={file}")
    parser = _Parser(prog="spec", allow_abbrev=False)
    kubernetes.add_arguments(parser)
    plan = kubernetes.plan_of(parser.parse_args([*_metrics(spec), *words]))
    return RunPlan(spec=plan.spec, metrics_port=plan.config.measure.metrics_port)


def words_of(spec: Mapping[str, Any], excluded: Sequence[str]) -> list[str]:  # Any: JSON
    """Return the options of `penstock launch kubernetes` that a TrainingRun's `spec` has as fields.

    >>> words_of({"nodes": "2:4", "volumes": [{"claim": "runs", "path": "/runs"}]}, ["n7"])
    ['--nodes=2:4', '--volume=runs:/runs', '--exclude-node=n7']
    """
    options = {name: re.sub("[A-Z]", lambda letter: f"-{letter[0].lower()}", name) for name in _OPTIONS}
    words = [f"--{option}={spec[name]}" for name, option in options.items() if name in spec]
    words += [f"--{name}" for name in _FLAGS if spec.get(name)]
    words += [f"--set={setting}" for setting in spec.get("set", [])]
    words += [f"--volume={volume['claim']}:{volume['path']}" for volume in spec.get("volumes", [])]
    words += [f"--node-selector={label}={value}" for label, value in spec.get("nodeSelector", {}).items()]
    words += [f"--env={name}={value}" for name, value in spec.get("env", {}).items()]
    words += [f"--secret={one['name']}=key:{one['secret']}/{one['key']}" for one in spec.get("secrets", [])]
    nodes = dict.fromkeys([*spec.get("excludeNodes", []), *excluded])
    return words + [f"--exclude-node={name}" for name in nodes]


def _metrics(spec: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """Return the settings with which the first rank tells its progress, unless the recipe has its own."""
    try:
        measure = tomllib.loads(spec["recipe"]).get("measure", {})
    except tomllib.TOMLDecodeError:  # told by who reads it next
        return []
    if not isinstance(measure, dict):
        return []
    found = []
    if not measure.get("metrics_port"):
        found.append(f"--set=measure.metrics_port={METRICS_PORT}")
    if not measure.get("metrics_host"):
        found.append("--set=measure.metrics_host=0.0.0.0")
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"A field of the TrainingRun is wrong: {message}")
