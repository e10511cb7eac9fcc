"""Pods of a run on Kubernetes: image, volumes, devices, code and networks; what `RunSpec` lacks for it.

Nothing here asks a cluster, and no client of one is needed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal

from penstock.core.errors import UsageError
from penstock.core.limits import Limit, check_limits, limited
from penstock.launch.pod_networks import DOMAIN, NAME, PREFIX, PROVIDERS, RESOURCE, PodNetwork
from penstock.launch.pods.patch import QUANTITY

OWN_PATHS = ("/tmp", "/cache", "/dev/shm", "/etc/penstock", "/etc/penstock-code")
"""What every pod has besides its claims; see render/pod_template.py."""
_SYSTEM_PATHS = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/opt/penstock", "/proc", "/run",
    "/sbin", "/sys", "/usr", "/var/run",
)  # fmt: skip
"""Folders of the system, the container runtime and the image: a claim there hides them, or is refused."""
_SHARED_MODES = ("ReadWriteMany", "ReadOnlyMany")
_OBJECT_FIX = "Lower-case letters, digits and -, with a letter or digit at both ends."
_LABEL = Limit(
    pattern="[a-z0-9]([-a-z0-9]*[a-z0-9])?",
    longest=63,
    says="the name of a Kubernetes object",
    fix=_OBJECT_FIX,
)
_DOMAIN = Limit(
    pattern=DOMAIN,
    longest=253,
    says="the name of a Kubernetes object",
    fix=_OBJECT_FIX,
)
_QUANTITY = Limit(
    pattern=QUANTITY,
    longest=32,
    says="a Kubernetes quantity",
    fix="Example: 64Gi.",
)
_KEY = Limit(
    pattern=f"({PREFIX})?{NAME}",
    longest=317,
    says="the key of a label",
    fix="Example: topology.kubernetes.io/zone: letters, digits, -, _ and ., at most 63 after the slash.",
)
_PATH = Limit(
    pattern=r"(/([^/:\x00-\x1f\x7f.][^/:\x00-\x1f\x7f]*|\.[^/:\x00-\x1f\x7f.][^/:\x00-\x1f\x7f]*))+",
    longest=4096,
    says="CLAIM:PATH with an absolute path in the pod",
    fix="Leave out . and .. and empty parts, colons and control characters.",
)
_LABEL_VALUE = re.compile(f"({NAME})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodVolume:
    """A PersistentVolumeClaim, mounted into every pod."""

    claim: str = limited(_DOMAIN)
    path: str = limited(_PATH)
    """Absolute path in the pod, outside the folders of the system and of the image."""
    access_mode: str = "ReadWriteMany"
    """Access mode of the claim. The engine asks the cluster for the real one before it submits."""

    def __post_init__(self) -> None:
        check_limits(self, named="The {} of --volume")
        own = PurePosixPath(self.path)
        hidden = [
            path for path in _SYSTEM_PATHS if own.is_relative_to(path) or own in PurePosixPath(path).parents
        ]
        if hidden:
            raise UsageError(
                f"--volume mounts a claim over {hidden[0]}, which belongs to the system or the image",
                got=f"{self.claim}:{self.path}",
                fix="Give it a path of its own, such as /runs or /data.",
            )

    @property
    def is_shared(self) -> bool:
        """True if pods on several nodes can mount it."""
        return self.access_mode in _SHARED_MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCode:
    """Source code that is laid over the image, so that a change needs no image build."""

    sha256: str
    """Digest of the archive (tar.gz); it names the ConfigMap, and the pod checks it."""
    address: str = ""
    """Address of an object store with the archive at code/SHA256.tar.gz. Empty: a ConfigMap holds it, which
    takes at most 1 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """How the nodes of a run become pods."""

    image: str
    """Container image with Penstock and torch."""
    recipe: str = ""
    """Text of the recipe; pods read it from a ConfigMap."""
    namespace: str = limited(_LABEL, "default")
    """Namespace of the pods."""
    api: Literal["jobset", "trainjob"] = "jobset"
    """Kind of the job: a JobSet, or a TrainJob of Kubeflow Trainer v2 with its TrainingRuntime."""
    volumes: tuple[PodVolume, ...] = ()
    """Relative paths of the recipe begin in the first one."""
    cache: str = limited(_QUANTITY, "50Gi")
    """Size of the folder on the node's disk that holds parts of remote corpora."""
    shared_memory: str = limited(_QUANTITY, "8Gi")
    """Size of /dev/shm, taken from the pod's memory."""
    device: str = limited(RESOURCE, "")
    """Resource of which each process gets one, such as nvidia.com/gpu. Empty: none."""
    cpu: str = limited(_QUANTITY, "")
    """CPU cores of a pod, such as 16; request and limit. Empty: the cluster's."""
    memory: str = limited(_QUANTITY, "")
    """Memory of a pod, such as 64Gi; request and limit. Empty: the cluster's."""
    fs_group: int | None = limited(Limit(least=0, most=2**31 - 1, says="the number of a group"), None)
    """Group that volumes are handed to. None: the cluster's, as OpenShift chooses its own."""
    service_account: str = limited(_DOMAIN, "")
    """Service account of the pods. Empty: the namespace's."""
    priority_class: str = limited(_DOMAIN, "")
    """Priority class of the pods. Empty: the cluster's."""
    node_selector: tuple[tuple[str, str], ...] = limited(_KEY, ())
    """Labels that a node must have."""
    excluded_nodes: tuple[str, ...] = limited(replace(_DOMAIN, option="exclude-node"), ())
    """Node that gets no pod, such as one that a preflight found slow."""
    required_topology: str = limited(_KEY, "")
    """Node label of a level of Kueue's topology in which all pods must be, such as a rack's. Empty: none."""
    preferred_topology: str = limited(_KEY, "")
    """The same, but the run also starts where that is not possible. Empty: none."""
    code: PodCode | None = None
    network_provider: str = "nad"
    """`nad`: NetworkAttachmentDefinitions for Multus. `dra`: ResourceClaimTemplates for DRANET.
    `multi-nic-cni`: a MultiNicNetwork."""
    networks: tuple[PodNetwork, ...] = ()
    """Network cards besides the cluster's own network."""
    network_policy: Literal["run", "none"] = "run"
    """Who reaches the pods. run: pods of the run, and others at the port of metrics, by a NetworkPolicy.
    none: no policy is made, for instance because you have no right to."""
    open_ports: tuple[int, ...] = ()
    """Ports that others may reach, such as that of metrics."""
    patch: str = ""
    """Further fields of the pods, as JSON, which is checked when it is merged (launch/pods/patch.py)."""

    def __post_init__(self) -> None:
        if not self.image or not self.image.isprintable() or " " in self.image:
            raise UsageError(
                "--image names the container image of the pods",
                got=self.image,
                fix="Example: --image registry.example/penstock:0.1.",
            )
        check_limits(self)
        for key, value in self.node_selector:
            if len(value) > 63 or not _LABEL_VALUE.fullmatch(value):
                raise UsageError(
                    "--node-selector takes LABEL=VALUE with the value of a label",
                    got=f"{key}={value}",
                    fix="At most 63 letters, digits, -, _ and ., with a letter or digit at both ends.",
                )
        for option, value, known in (
            ("--api", self.api, ("jobset", "trainjob")),
            ("--network-provider", self.network_provider, PROVIDERS),
            ("--network-policy", self.network_policy, ("run", "none")),
        ):
            if value not in known:
                raise UsageError(f"{option} takes one of {', '.join(known)}", got=value)
        _check_apart(self.volumes)
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
                fix=f"Give each claim its own path, other than {', '.join(OWN_PATHS)}.",
            )
