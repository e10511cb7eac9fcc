"""Pods of a run on Kubernetes: image, volumes, devices, code and networks; what `RunSpec` lacks for it.

Nothing here asks a cluster, and no client of one is needed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import UsageError
from penstock.launch.pod_networks import PROVIDERS, PodNetwork

NETWORK_POLICIES = ("run", "none")
OWN_PATHS = ("/tmp", "/cache", "/dev/shm", "/etc/penstock", "/etc/penstock-code")
"""What every pod has besides its claims; see render/pod_template.py."""
_SHARED_MODES = ("ReadWriteMany", "ReadOnlyMany")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?|Ki)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodVolume:
    """A PersistentVolumeClaim, mounted into every pod."""

    claim: str
    path: str
    """Absolute path in the pod."""
    access_mode: str = "ReadWriteMany"
    """Access mode of the claim. The engine asks the cluster for the real one before it submits."""

    def __post_init__(self) -> None:
        _check_name("--volume", self.claim, _DOMAIN)
        _check_path("--volume", self.path)

    @property
    def is_shared(self) -> bool:
        """True if pods on several nodes can mount it."""
        return self.access_mode in _SHARED_MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCode:
    """Source code that is laid over the image, so that a change needs no image build."""

    sha256: str
    """Of the archive (tar.gz); names the ConfigMap, and is checked in the pod."""
    address: str = ""
    """Address of an object store with the archive at code/SHA256.tar.gz. Empty: a ConfigMap holds it, which
    takes at most 1 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """How the nodes of a run become pods."""

    image: str
    """Image that has Penstock and torch installed."""
    recipe: str = ""
    """Text of the recipe; pods read it from a ConfigMap."""
    namespace: str = "default"
    api: str = "jobset"
    """`jobset`: a JobSet. `trainjob`: a TrainJob of Kubeflow Trainer v2, and a TrainingRuntime for it."""
    volumes: tuple[PodVolume, ...] = ()
    """Relative paths of the recipe begin in the first one."""
    cache: str = "50Gi"
    """Size of the folder on the node's disk that holds parts of remote corpora; it is lost with the pod."""
    shared_memory: str = "8Gi"
    """Size of /dev/shm, taken from the pod's memory."""
    device: str = ""
    """Resource name of a device, such as nvidia.com/gpu; each process gets one. Empty: CPU only."""
    cpu: str = ""
    """CPU cores of a pod, such as 16; request and limit. Empty: the cluster's default."""
    memory: str = ""
    """Memory of a pod, such as 64Gi; request and limit. Empty: the cluster's default."""
    fs_group: int = 0
    """Group that volumes are handed to. 0: none, as OpenShift chooses its own."""
    service_account: str = ""
    priority_class: str = ""
    node_selector: tuple[tuple[str, str], ...] = ()
    """Labels that a node must have."""
    excluded_nodes: tuple[str, ...] = ()
    """Names of nodes that get no pod of the run, such as those that a preflight found slow."""
    required_topology: str = ""
    """Node label of a level of Kueue's topology in which all pods must be, such as a rack's."""
    preferred_topology: str = ""
    """The same, but the run starts where that is not possible."""
    code: PodCode | None = None
    network_provider: str = "nad"
    """`nad`: NetworkAttachmentDefinitions for Multus. `dra`: ResourceClaimTemplates for DRANET.
    `multi-nic-cni`: a MultiNicNetwork."""
    networks: tuple[PodNetwork, ...] = ()
    """Network cards besides the cluster's own network."""
    network_policy: str = "run"
    """`run`: a NetworkPolicy lets only pods of the run reach its pods, but for `open_ports`. `none`: none is
    made, where the cluster forbids it, or its network plugin treats it wrongly."""
    open_ports: tuple[int, ...] = ()
    """Ports that others may reach, such as that of metrics."""

    def __post_init__(self) -> None:
        if not self.image or not self.image.isprintable() or " " in self.image:
            raise UsageError(
                "--image names the container image of the pods",
                got=self.image,
                fix="Example: --image registry.example/penstock:0.1.",
            )
        _check_name("--namespace", self.namespace, _LABEL)
        for option, value, known in (
            ("--api", self.api, ("jobset", "trainjob")),
            ("--network-provider", self.network_provider, PROVIDERS),
            ("--network-policy", self.network_policy, NETWORK_POLICIES),
        ):
            if value not in known:
                raise UsageError(f"{option} takes one of {', '.join(known)}", got=value)
        for option, names in (
            ("--service-account", [self.service_account]),
            ("--priority-class", [self.priority_class]),
            ("--exclude-node", self.excluded_nodes),
        ):
            for name in filter(None, names):
                _check_name(option, name, _DOMAIN)
        for option, size in (
            ("--cache", self.cache),
            ("--shared-memory", self.shared_memory),
            ("--cpu", self.cpu),
            ("--memory", self.memory),
        ):
            if size and not _QUANTITY.fullmatch(size):
                raise UsageError(f"{option} takes a Kubernetes quantity", got=size, fix="Example: 64Gi.")
        _check_apart(self.volumes)
        if self.fs_group < 0:
            raise UsageError("--fs-group takes the number of a group", got=self.fs_group)
        if self.required_topology and self.preferred_topology:
            raise UsageError(
                "--required-topology and --preferred-topology exclude one another",
                got=[self.required_topology, self.preferred_topology],
                fix="Keep one of them.",
            )


def _check_apart(volumes: Sequence[PodVolume]) -> None:
    """Refuse two claims at one path, or one at a path that every pod has."""
    paths = [*OWN_PATHS, *(volume.path for volume in volumes)]
    for volume in volumes:
        if paths.count(volume.path) > 1:
            raise UsageError(
                "--volume names a path of the pods at which something else is mounted",
                got=f"{volume.claim}:{volume.path}",
                fix=f"Give each claim a path of its own, besides {', '.join(OWN_PATHS)}.",
            )


def _check_name(option: str, name: str, form: re.Pattern[str]) -> None:
    if not form.fullmatch(name) or len(name) > (63 if form is _LABEL else 253):
        raise UsageError(
            f"{option} takes the name of a Kubernetes object",
            got=name,
            fix="Lower-case letters, digits and -, with a letter or digit at both ends.",
        )


def _check_path(option: str, path: str) -> None:
    if not path.startswith("/") or path == "/" or ":" in path or not path.isprintable():
        raise UsageError(f"{option} takes CLAIM:PATH with an absolute path in the pod", got=path)
