"""Client of a cluster's API server: read, apply, own and delete objects; read the logs of pods.

Refusals, and a server that is away, become errors that name the object and the remedy. Needs the package
lightkube; nothing else in `penstock launch` does.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.errors import PenstockError
from penstock.launch.engines.engine import EngineUnreachable

if TYPE_CHECKING:
    from lightkube import Client

Object = Mapping[str, Any]  # Any: JSON
ANSWER_S = 15.0
_MANAGER = "penstock"
_KINDS = {
    "ConfigMap": "configmaps",
    "Pod": "pods",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Secret": "secrets",
    "Service": "services",
    "Deployment": "deployments",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "JobSet": "jobsets",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
    "NetworkPolicy": "networkpolicies",
    "NetworkAttachmentDefinition": "network-attachment-definitions",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "InferenceService": "inferenceservices",
    "LocalQueue": "localqueues",
    "ClusterQueue": "clusterqueues",
    "Cohort": "cohorts",
    "MultiNicNetwork": "multinicnetworks",
    "TrainingRun": "trainingruns",
    "Event": "events",
    "Lease": "leases",
}
GLOBAL_KINDS = ("ClusterQueue", "Cohort", "MultiNicNetwork")
"""Kinds that are in no namespace."""
_NOT_STARTED, _NOT_FOUND, _FORBIDDEN, _CONFLICT = 400, 404, 403, 409


class UnknownKind(PenstockError):
    """The cluster does not serve this kind of object: its controller is not installed."""


class LogBrokeOff(PenstockError):
    """The connection to the log of a pod broke off in the middle; the pod may print on."""


class LogLine(NamedTuple):
    """Line of a pod's log."""

    printed_at: datetime
    """By the clock of its node, to a microsecond."""
    text: str
    """With its end."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ClusterConnection:
    """A cluster and a namespace of it; its sockets are closed once nobody refers to it."""

    client: "Client"
    server: str
    context: str
    namespace: str

    def get(self, api: str, kind: str, name: str) -> Object | None:
        """Return an object; None: there is none."""
        with _refusals(self, f"{kind} {name}", api):
            try:
                found: Object = self.client.get(_resource(api, kind), name)
            except _api_error() as error:
                if error.status.code == _NOT_FOUND:
                    return None
                raise
            return found

    def all(self, api: str, kind: str, labels: Mapping[str, str] | None = None) -> list[Object]:
        """Return the objects of a kind with some labels."""
        with _refusals(self, kind, api):
            return list(self.client.list(_resource(api, kind), labels=dict(labels or {})))

    def apply(self, found: Object, *, is_tried: bool = False) -> Object:
        """Create or change an object; `is_tried`: the server only says whether it would."""
        name = found["metadata"]["name"]
        with _refusals(self, f"{found['kind']} {name}", found["apiVersion"]):
            kind = _resource(found["apiVersion"], found["kind"])
            made: Object = self.client.apply(
                kind.from_dict(found), field_manager=_MANAGER, force=True, dry_run=is_tried
            )
            return made

    def create(self, found: Object) -> bool:
        """Create an object; False: there is one of that name."""
        with _refusals(self, f"{found['kind']} {found['metadata']['name']}", found["apiVersion"]):
            return self._unless_conflict(self.client.create, found)

    def replace(self, found: Object) -> bool:
        """Replace an object; False: it is not of the version that this one was made of."""
        with _refusals(self, f"{found['kind']} {found['metadata']['name']}", found["apiVersion"]):
            return self._unless_conflict(self.client.replace, found)

    def _unless_conflict(self, write: Callable[[Any], Any], found: Object) -> bool:
        try:
            write(_resource(found["apiVersion"], found["kind"]).from_dict(found))
        except _api_error() as error:
            if error.status.code == _CONFLICT:
                return False
            raise
        return True

    def set_status(self, api: str, kind: str, name: str, change: Object) -> None:
        """Merge a change into the status of an object, if it exists."""
        from lightkube.types import PatchType

        with _refusals(self, f"the status of {kind} {name}"):
            try:
                of_status = _resource(api, kind).Status
                self.client.patch(of_status, name, {"status": change}, patch_type=PatchType.MERGE)
            except _api_error() as error:
                if error.status.code != _NOT_FOUND:
                    raise

    def delete(self, api: str, kind: str, name: str, *, grace_s: int | None = None) -> None:
        """Delete an object if it exists, and what it owns."""
        with _refusals(self, f"{kind} {name}", api):
            try:
                self.client.delete(_resource(api, kind), name, grace_period=grace_s)
            except _api_error() as error:
                if error.status.code != _NOT_FOUND:
                    raise

    def own(self, found: Object, owner: Object, *, is_new: bool = False) -> bool:
        """Make an object one that is deleted with its owner, or its last one; False: it is gone.

        Args:
            is_new: it has no owner yet, and is not read.
        """
        reference = {key: owner["metadata"][key] for key in ("name", "uid")}
        reference |= {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
        name = found["metadata"]["name"]
        with _refusals(self, f"{found['kind']} {name}"):
            kind = _resource(found["apiVersion"], found["kind"])
            from lightkube.types import PatchType

            try:
                before = [] if is_new else owners_of(self.client.get(kind, name))
                kept = [one for one in before if one["uid"] != reference["uid"]]
                change = {"metadata": {"ownerReferences": [*kept, reference]}}
                self.client.patch(kind, name, change, patch_type=PatchType.MERGE)
            except _api_error() as error:
                if error.status.code != _NOT_FOUND:
                    raise
                return False
            return True

    def log(self, pod: str, *, follow: bool) -> Iterator[LogLine]:
        """Yield the lines of a pod's log; none if it has not started, or is gone.

        Args:
            follow: go on with lines as they come, until the pod ends or the server closes the connection.

        Raises:
            LogBrokeOff: the connection broke off; a line of which only the beginning came is left out.
            PenstockError: the server refuses the log, or is away.
        """
        printed_at = datetime.min.replace(tzinfo=UTC)
        with _refusals(self, f"the log of pod {pod}"):
            try:
                for line in lines_of(self._log_bytes(pod, follow=follow)):
                    stamp, _, text = line.partition(" ")
                    try:
                        printed_at = datetime.fromisoformat(stamp)
                    except ValueError:  # the kubelet's own words have no time
                        text = line
                    yield LogLine(printed_at, text)
            except _api_error() as error:
                if error.status.code not in (_NOT_STARTED, _NOT_FOUND):
                    raise

    def _log_bytes(self, pod: str, *, follow: bool) -> Iterator[bytes]:
        """Yield a pod's log in pieces.

        `Client.log` does the same, but cuts lines wherever str.splitlines does, as at U+2028.
        """
        from lightkube.resources.core_v1 import PodLog

        client = self.client._client
        request = client.prepare_request(
            "get", PodLog, name=pod, params={"timestamps": True, "follow": follow}
        )
        if follow:  # a pod may print nothing for long
            request.timeout = _httpx().Timeout(ANSWER_S, read=None)
        response = client.send(client.build_adapter_request(request), stream=True)
        try:
            if response.is_error:
                response.read()  # for the message
            client.raise_for_status(response)  # type: ignore[no-untyped-call]
            yield from response.iter_bytes()
        except _httpx().TransportError as error:
            raise LogBrokeOff(
                f"The log of pod {pod} broke off: {str(error).strip() or type(error).__name__}",
                fix="Ask for it again; if that fails too, look at the network and the pod's node.",
            ) from None
        finally:
            response.close()


def lines_of(pieces: Iterable[bytes]) -> Iterator[str]:
    r"""Yield the lines of a text that comes in pieces, each with its end; only "\n" ends one.

    >>> list(lines_of(["a\u2028b".encode(), b"c\r1\n\nd"]))
    ['a\u2028bc\r1\n', '\n', 'd\n']
    """
    begun: list[bytes] = []
    for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end]).decode(errors="replace") + "\n"
            begun = []
        begun.append(rest)
    if last := b"".join(begun):
        yield last.decode(errors="replace") + "\n"


@contextmanager
def _refusals(cluster: "ClusterConnection", what: str, api: str = "") -> Iterator[None]:
    """Turn errors of the API server, and of the way to it, into ours."""
    try:
        yield
    except _api_error() as error:
        message = error.status.message or str(error)
        if error.status.code == _NOT_FOUND and "could not find the requested resource" in message:
            message = f"it does not know {api or 'this kind'}: its controller is not installed"
        is_forbidden = error.status.code == _FORBIDDEN
        without = " Or do without: --network-policy none." if what.startswith("NetworkPolicy") else ""
        raise PenstockError(
            f"The API server refused {what} in namespace {cluster.namespace}: {message}",
            fix=f"Ask for the right: kubectl auth can-i --list.{without}"
            if is_forbidden
            else "Correct what it names.",
        ) from None
    except _httpx().HTTPStatusError as error:  # an answer without a Status: there is no such path
        if error.response.status_code != _NOT_FOUND:
            raise _unreachable(cluster.server, error) from None
        raise UnknownKind(
            f"The cluster does not know {api or 'the kind'} of {what}: its controller is not installed",
            fix="Install it, or choose another --api or network provider.",
        ) from None
    except _httpx().HTTPError as error:
        raise _unreachable(cluster.server, error) from None


def owners_of(found: Object) -> Sequence[Object]:
    """Return the references to an object's owners."""
    return found["metadata"].get("ownerReferences") or []


def _api_error() -> Any:  # type[ApiError], of a package that may be absent
    from lightkube.core.exceptions import ApiError

    return ApiError


def _httpx() -> Any:  # the client's HTTP library, under any of its names
    from lightkube.core import exceptions

    return vars(exceptions)["httpx"]


def _unreachable(server: str, error: BaseException) -> EngineUnreachable:
    return EngineUnreachable(
        f"The cluster at {server} cannot be reached: {str(error).strip() or type(error).__name__}",
        fix="Check the network and `kubectl cluster-info`, or name another cluster by KUBECONFIG.",
    )


@cache
def _resource(api: str, kind: str) -> Any:  # Any: lightkube makes the class, once in a process
    from lightkube.generic_resource import (
        create_global_resource,
        create_namespaced_resource,
        get_generic_resource,
    )

    if (known := get_generic_resource(api, kind)) is not None:  # type: ignore[no-untyped-call]
        return known
    group, _, version = api.rpartition("/")
    make = create_global_resource if kind in GLOBAL_KINDS else create_namespaced_resource
    return make(group, version, kind, _KINDS[kind])


def connect(namespace: str, *, context: str = "", answer_s: float = ANSWER_S) -> ClusterConnection:
    """Return a connection to the cluster of KUBECONFIG, ~/.kube/config, or of this pod.

    Args:
        answer_s: seconds that the API server may be silent before a request is given up.

    Raises:
        PenstockError: there is no client, or no configuration.
    """
    try:
        from lightkube import Client, KubeConfig
        from lightkube.core.exceptions import ConfigError
        from yaml import YAMLError
    except ImportError:
        raise PenstockError(
            "Kubernetes needs the package lightkube, which is not installed",
            fix="pip install 'penstock[kubernetes]'; --dry-run needs none.",
        ) from None
    try:
        config = KubeConfig.from_env().get(context or None)
        client = Client(
            config, namespace=namespace, timeout=_httpx().Timeout(answer_s), field_manager=_MANAGER
        )
    except (ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError, YAMLError) as error:
        said = " ".join(str(error).split())  # of a file that is not YAML, or holds something else
        raise PenstockError(
            f"No cluster is configured: {said or type(error).__name__}",
            fix="Name one by KUBECONFIG; `kubectl config current-context` shows it.",
        ) from None
    assert config is not None  # a name was found, or the current one
    cluster = ClusterConnection(client, config.cluster.server, config.context_name, namespace)
    # Not by whoever makes another connection: threads may be in the middle of a request.
    weakref.finalize(cluster, client.close).atexit = False
    return cluster
