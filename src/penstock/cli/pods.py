"""Pods of a job or a server: their options, and what a cluster says of their objects."""

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.options import add_fields, fields_of, options_of, text_file
from penstock.core import config as configs
from penstock.core.errors import PackageMissing, PenstockError, UsageError
from penstock.launch.pod_networks import PodNetworks
from penstock.launch.pods.patch import read_patch
from penstock.launch.pods.pod import PodCode, PodSpec, PodVolume
from penstock.launch.render.kubernetes import is_inside

if TYPE_CHECKING:
    from penstock.launch.engines.kubernetes_api import ClusterConnection

WORK = "/tmp/work"
"""Where relative paths begin in pods without a volume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """Options from which fields of `PodSpec` are made."""

    volume: Annotated[tuple[str, ...], "CLAIM:PATH"] = ()
    """A PersistentVolumeClaim, and where pods have it."""
    node_selector: Annotated[tuple[str, ...], "LABEL=VALUE"] = ()
    """Only nodes with this label get pods."""
    pod_patch: Annotated[Path | None, "FILE.yaml"] = None
    """Tolerations, imagePullSecrets, affinity, annotations, labels and resources of the pods."""
    networks: Annotated[Path | None, "FILE.toml"] = None
    """Network cards of the pods."""


def add_pod_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of pods that jobs and servers share."""
    add_fields(
        parser,
        PodSpec,
        *("image", "namespace", "device", "cpu", "memory", "cache", "shared_memory", "fs_group"),
        *("service_account", "priority_class"),
        excluded_nodes="--exclude-node",
    )
    add_fields(parser, PodOptions)


def pod_spec(arguments: argparse.Namespace, code: PodCode | None = None) -> PodSpec:
    """Return the pods of the options.

    Raises:
        UsageError: an option is wrong.
    """
    networks, options = None, options_of(arguments, PodOptions)
    if options.networks:
        raw = configs.load_toml(options.networks, what="The file of networks")
        networks = configs.build(PodNetworks, raw)
    return PodSpec(
        **fields_of(arguments, PodSpec),
        volumes=tuple(map(_volume, options.volume)),
        node_selector=tuple(map(_label, options.node_selector)),
        code=code,
        network_provider=networks.provider if networks else "nad",
        networks=networks.networks if networks else (),
        patch=_patch(options.pod_patch) if options.pod_patch else "",
    )


def _patch(path: Path) -> str:
    """Return a patch of the pods as JSON; its file is YAML, unless its name ends with `.json`.

    Raises:
        UsageError: it has a field that is refused, an anchor, a key twice, or is no YAML.
        PackageMissing: there is no package to read YAML.
    """
    text = text_file(path, option="--pod-patch", longest=16 << 10)
    patch = text if path.suffix == ".json" else _json_of(text)
    read_patch(patch)
    return patch


def _json_of(text: str) -> str:
    """Return a table in YAML as JSON; a date stays the text that was written."""
    try:
        from yaml import SafeLoader, YAMLError
    except ImportError:
        raise PackageMissing("--pod-patch needs PyYAML", fix="pip install 'penstock[kubernetes]'") from None
    try:
        loader = SafeLoader(text)
        loader.yaml_implicit_resolvers = {
            first: [known for known in resolvers if known[0] != "tag:yaml.org,2002:timestamp"]
            for first, resolvers in SafeLoader.yaml_implicit_resolvers.items()
        }
        if (node := loader.get_single_node()) is None:
            raise ValueError("it is empty")
        _check_plain(node, set())
        found = loader.construct_document(node)
        patch = json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise UsageError(f"The file of --pod-patch is not valid YAML: {said}") from None
    if not isinstance(found, dict):
        raise UsageError(
            "--pod-patch takes a table, such as `metadata: {labels: {team: a}}`", got=type(found).__name__
        )
    return patch


def _check_plain(node: Any, seen: set[int]) -> None:  # Any: a node of YAML
    if id(node) in seen:
        raise ValueError("it has an anchor that is used again; write it out")
    seen.add(id(node))
    if isinstance(node.value, str):
        return
    pairs = [one for one in node.value if isinstance(one, tuple)]
    keys = [key.value if isinstance(key.value, str) else "?" for key, _ in pairs]
    if other := next((key.value for key, _ in pairs if key.tag != "tag:yaml.org,2002:str"), None):
        raise ValueError(f"the key {other} is no text: write it in quotes")
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"it has the key {twice} twice")
    for one in node.value:
        for part in one if isinstance(one, tuple) else (one,):
            _check_plain(part, seen)


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


def check_mounted(what: str, path: PurePosixPath, mounts: Sequence[PurePosixPath], *, fix: str) -> None:
    """Refuse a path that is in no volume of the pods.

    Raises:
        UsageError: with the path and the volumes.
    """
    if not any(is_inside(path, mount) for mount in mounts):
        known = ", ".join(map(str, mounts)) or "none"
        raise UsageError(
            f"The {what} is in no volume of the pods ({known}), and is lost with a pod",
            got=str(path),
            fix=f"Mount a claim: --volume CLAIM:PATH. {fix}",
        )


def tried(namespace: str, ask: Callable[["ClusterConnection"], str]) -> str:
    """Return what a cluster says of a launch, if one is configured and answers.

    Raises:
        PenstockError: it would refuse the launch.
    """
    from penstock.launch.engines.kubernetes_api import connect

    try:
        cluster = connect(namespace)
        cluster.all("v1", "ConfigMap")
    except PenstockError as error:
        return f"no cluster tried these objects: {error}"
    return ask(cluster)


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
