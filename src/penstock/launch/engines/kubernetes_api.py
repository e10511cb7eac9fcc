"""Client of a cluster's API server: read, apply, own and delete objects; read the logs of pods.

Refusals, and a server that is away, become errors that name the object and the remedy. The package lightkube
reads the configuration and logs in; requests are JSON over its HTTP client, which threads may share. Its own
typed objects are not used: their decoder is built at first use, and two threads that do so at once crash.
"""

import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from penstock.core.errors import PenstockError
from penstock.launch.engines.engine import EngineUnreachable

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
_JSON, _MERGE, _APPLY = "application/json", "application/merge-patch+json", "application/apply-patch+yaml"
_PAGE = 500
"""Objects of one answer to a list."""


class _Refused(Exception):
    """The API server refused a request; `code` is HTTP's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


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

    http: Any  # httpx.Client, of lightkube's own httpx
    server: str
    context: str
    namespace: str

    def get(self, api: str, kind: str, name: str) -> Object | None:
        """Return an object; None: there is none."""
        with _refusals(self, f"{kind} {name}", api):
            found: Object | None = self._unless(_NOT_FOUND, "GET", self._path(api, kind, name))
            return found

    def all(self, api: str, kind: str, labels: Mapping[str, str] | None = None) -> list[Object]:
        """Return the objects of a kind with some labels."""
        selector = ",".join(f"{key}={value}" for key, value in (labels or {}).items())
        found: list[Object] = []
        page: dict[str, Any] = {"limit": _PAGE, **({"labelSelector": selector} if selector else {})}
        with _refusals(self, kind, api):
            while True:
                answer = self._ask("GET", self._path(api, kind), page)
                found += answer["items"]
                if not (more := answer["metadata"].get("continue")):
                    return found
                page["continue"] = more

    def apply(self, found: Object, *, is_tried: bool = False) -> Object:
        """Create or change an object; `is_tried`: the server only says whether it would."""
        asked = {"force": "true", **({"dryRun": "All"} if is_tried else {})}
        with _refusals(self, f"{found['kind']} {found['metadata']['name']}", found["apiVersion"]):
            made: Object = self._ask("PATCH", self._path_of(found), asked, found, kind=_APPLY)
            return made

    def create(self, found: Object) -> bool:
        """Create an object; False: there is one of that name."""
        path = self._path(found["apiVersion"], found["kind"])
        with _refusals(self, f"{found['kind']} {found['metadata']['name']}", found["apiVersion"]):
            return self._unless(_CONFLICT, "POST", path, found) is not None

    def replace(self, found: Object) -> bool:
        """Replace an object; False: it is not of the version that this one was made of."""
        with _refusals(self, f"{found['kind']} {found['metadata']['name']}", found["apiVersion"]):
            return self._unless(_CONFLICT, "PUT", self._path_of(found), found) is not None

    def merge(self, api: str, kind: str, name: str, change: Object) -> bool:
        """Merge a change into an object; False: it is gone, or not of the version in the change."""
        with _refusals(self, f"{kind} {name}", api):
            try:
                path = self._path(api, kind, name)
                return self._unless(_NOT_FOUND, "PATCH", path, change, kind=_MERGE) is not None
            except _Refused as error:
                if error.code == _CONFLICT:
                    return False
                raise

    def set_status(self, api: str, kind: str, name: str, change: Object) -> None:
        """Merge a change into the status of an object, if it exists."""
        path = f"{self._path(api, kind, name)}/status"
        with _refusals(self, f"the status of {kind} {name}"):
            self._unless(_NOT_FOUND, "PATCH", path, {"status": change}, kind=_MERGE)

    def delete(self, api: str, kind: str, name: str, *, grace_s: int | None = None) -> None:
        """Delete an object if it exists, and what it owns."""
        how = None if grace_s is None else {"gracePeriodSeconds": grace_s}
        with _refusals(self, f"{kind} {name}", api):
            self._unless(_NOT_FOUND, "DELETE", self._path(api, kind, name), how)

    def own(self, found: Object, owner: Object, *, is_new: bool = False) -> bool:
        """Make an object one that is deleted with its owner, or its last one; False: it is gone.

        Args:
            is_new: it has no owner yet, and is not read.
        """
        reference = {key: owner["metadata"][key] for key in ("name", "uid")}
        reference |= {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
        path = self._path_of(found)
        with _refusals(self, f"{found['kind']} {found['metadata']['name']}"):
            before = {"metadata": {}} if is_new else self._unless(_NOT_FOUND, "GET", path)
            if before is None:
                return False
            kept = [one for one in owners_of(before) if one["uid"] != reference["uid"]]
            change = {"metadata": {"ownerReferences": [*kept, reference]}}
            return self._unless(_NOT_FOUND, "PATCH", path, change, kind=_MERGE) is not None

    def _path(self, api: str, kind: str, name: str = "") -> str:
        root = f"/apis/{api}" if "/" in api else f"/api/{api}"
        within = "" if kind in GLOBAL_KINDS else f"/namespaces/{self.namespace}"
        return f"{root}{within}/{_KINDS[kind]}{'/' if name else ''}{name}"

    def _path_of(self, found: Object) -> str:
        return self._path(found["apiVersion"], found["kind"], found["metadata"]["name"])

    def _unless(
        self, code: int, method: str, path: str, body: Object | None = None, *, kind: str = _JSON
    ) -> Any:  # Any: JSON
        """Return the answer; None: the server refused with this code."""
        try:
            return self._ask(method, path, body=body, kind=kind)
        except _Refused as error:
            if error.code == code:
                return None
            raise

    def _ask(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None = None,
        body: Object | None = None,
        *,
        kind: str = _JSON,
    ) -> Any:  # Any: JSON
        """Return the JSON of the server's answer.

        Raises:
            _Refused: it refused.
            httpx.HTTPError: it is away, or the answer is no Status of Kubernetes.
        """
        manager = {} if method in ("GET", "DELETE") else {"fieldManager": _MANAGER}
        response = self.http.request(
            method,
            path,
            params={**manager, **(params or {})},
            content=None if body is None else json.dumps(body),
            headers={} if body is None else {"Content-Type": kind},
        )
        _raise_for_refusal(response)
        return response.json()

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
            except _Refused as error:
                if error.code not in (_NOT_STARTED, _NOT_FOUND):
                    raise

    def _log_bytes(self, pod: str, *, follow: bool) -> Iterator[bytes]:
        """Yield a pod's log in pieces."""
        params = {"timestamps": "true", "follow": "true" if follow else "false"}
        request = self.http.build_request("GET", f"{self._path('v1', 'Pod', pod)}/log", params=params)
        if follow:  # a pod may print nothing for long
            request.extensions["timeout"] = _httpx().Timeout(ANSWER_S, read=None).as_dict()
        response = self.http.send(request, stream=True)
        try:
            if response.is_error:
                response.read()  # for the message
            _raise_for_refusal(response)
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
    except _Refused as error:
        message = str(error)
        if error.code == _NOT_FOUND and "could not find the requested resource" in message:
            message = f"it does not know {api or 'this kind'}: its controller is not installed"
        is_forbidden = error.code == _FORBIDDEN
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
    except (_httpx().HTTPError, _config_error()) as error:  # the second: no plugin, or no token
        raise _unreachable(cluster.server, error) from None


def owners_of(found: Object) -> Sequence[Object]:
    """Return the references to an object's owners."""
    return found["metadata"].get("ownerReferences") or []


def _raise_for_refusal(response: Any) -> None:  # httpx.Response
    """Raise `_Refused` with what a Status of Kubernetes says, or `httpx.HTTPStatusError`."""
    if response.is_success:
        return
    try:
        status = response.json()
    except ValueError:
        status = None
    if isinstance(status, dict) and status.get("kind") == "Status":
        raise _Refused(response.status_code, str(status.get("message") or status.get("reason") or ""))
    response.raise_for_status()


def _config_error() -> Any:  # type[ConfigError], of a package that may be absent
    from lightkube.core.exceptions import ConfigError

    return ConfigError


def _httpx() -> Any:  # the client's HTTP library, under any of its names
    from lightkube.core import exceptions

    return vars(exceptions)["httpx"]


def _unreachable(server: str, error: BaseException) -> EngineUnreachable:
    return EngineUnreachable(
        f"The cluster at {server} cannot be reached: {str(error).strip() or type(error).__name__}",
        fix="Check the network and `kubectl cluster-info`, or name another cluster by KUBECONFIG.",
    )


def connect(namespace: str, *, context: str = "", answer_s: float = ANSWER_S) -> ClusterConnection:
    """Return a connection to the cluster of KUBECONFIG, ~/.kube/config, or of this pod.

    Args:
        answer_s: seconds that the API server may be silent before a request is given up.

    Raises:
        PenstockError: there is no client, or no configuration.
    """
    try:
        from lightkube import KubeConfig
        from lightkube.config.client_adapter import Client, ConnectionParams
        from lightkube.core.exceptions import ConfigError
        from yaml import YAMLError
    except ImportError:
        raise PenstockError(
            "Kubernetes needs the package lightkube, which is not installed",
            fix="pip install 'penstock[kubernetes]'; --dry-run needs none.",
        ) from None
    try:
        config = KubeConfig.from_env().get(context or None)
        assert config is not None  # a name was found, or the current one
        http = Client(config, ConnectionParams(timeout=_httpx().Timeout(answer_s)))
    except (
        ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, YAMLError
    ) as error:  # fmt: skip
        said = " ".join(str(error).split())  # of a file that is not YAML, or holds something else
        raise PenstockError(
            f"No cluster is configured: {said or type(error).__name__}",
            fix="Name one by KUBECONFIG; `kubectl config current-context` shows it.",
        ) from None
    cluster = ClusterConnection(http, config.cluster.server, config.context_name, namespace)
    # Not by whoever makes another connection: threads may be in the middle of a request.
    weakref.finalize(cluster, http.close).atexit = False
    return cluster
