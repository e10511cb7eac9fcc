"""Fields of pods that a user sets beyond the options: a part of a pod template, merged before it is tried.

    metadata: {annotations, labels}
    spec: {tolerations, imagePullSecrets, affinity, containers: [{resources: {requests, limits}}]}

Every other field is refused by its path. A TrainingRun's pods are made with the operator's rights, so no
field here gives a pod a right or a volume, and none changes what another part of Penstock sets.
Annotations and labels are read by container runtimes and admission webhooks: a key with a domain is accepted
only if it is listed here, or if its domain is in PENSTOCK_POD_KEYS of the process that makes the objects.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from penstock.core import env
from penstock.core.config import parse_json
from penstock.core.errors import UsageError
from penstock.launch.pod_networks import DOMAIN, NAME, PREFIX, RESOURCE

Object = dict[str, Any]  # Any: JSON
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?|Ki)?"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_MAX_CHARACTERS, _MAX_ENTRIES, _MAX_TEXT = 16 << 10, 64, 1024
_HARMLESS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict",
    "karpenter.sh/do-not-disrupt",
    *(f"prometheus.io/{name}" for name in ("scrape", "port", "path", "scheme")),
}
"""Keys with a domain whose readers only choose nodes to remove, and endpoints to read metrics from."""
_OF_CONTROLLERS = ("controller-uid", "job-name", "pod-template-hash")
"""Labels by which controllers know their pods: a Job with others is refused once it is made."""
_OF_CLUSTER = re.compile(
    r"node\.((cloudprovider\.)?kubernetes|cluster\.x-k8s)\.io/.*"
    r"|node-role\.kubernetes\.io/(control-?plane|master|etcd)|CriticalAddonsOnly"
)
"""Taints by which Kubernetes and Cluster API keep pods from control planes and from nodes not ready."""


@dataclass(frozen=True, slots=True)
class _Value:
    says: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class _Table:
    key: _Value
    value: _Value


def _matching(pattern: str, says: str, longest: int = _MAX_TEXT) -> _Value:
    known = re.compile(pattern)
    return _Value(
        says, lambda value: isinstance(value, str) and len(value) <= longest and bool(known.fullmatch(value))
    )


def _one_of(*known: str) -> _Value:
    return _Value(f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


def _whole(least: int, most: int) -> _Value:
    return _Value(
        f"a whole number from {least} to {most:,}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
    )


def _is_open_key(value: Any) -> bool:  # Any: JSON
    """Return True for a key that no runtime and no webhook reads, unless the user's own does.

    >>> [_is_open_key(key) for key in ("team", "cost-center", "io.kubernetes.cri-o.Devices", "cdi.k8s.io/a")]
    [True, True, False, False]
    """
    domain, slash, name = str(value).rpartition("/")
    if not _KEY.fits(value):
        return False
    if not slash:
        return "." not in name and name not in _OF_CONTROLLERS
    opened = map(str.strip, env.variable("PENSTOCK_POD_KEYS").split(","))
    is_own = f"{domain}/" in opened and not re.fullmatch(r"(.*\.)?(kubernetes|k8s)\.io", domain)
    return value in _HARMLESS or is_own


_KEY = _matching(f"({PREFIX})?{NAME}", "the key of a label", 317)
_OPEN_KEY = _Value("keys without a dot and a slash, and a few more: see PENSTOCK_POD_KEYS", _is_open_key)
_TEXT = _matching(
    r"[^\x00-\x08\x0b-\x1f\x7f]*", f"a text of at most {_MAX_TEXT:,} characters, in quotes if it is a number"
)
_LABEL = _matching(
    f"({NAME})?", "the value of a label: at most 63 letters, digits, - _ and ., in quotes if it is a number"
)
_OBJECT = _matching(DOMAIN, "the name of a Kubernetes object", 253)
_AMOUNT = _Value(
    "a Kubernetes quantity",
    lambda value: not isinstance(value, bool) and bool(re.fullmatch(QUANTITY, str(value))),
)
_RESOURCE = _matching(
    rf"cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|{RESOURCE.pattern}", "the name of a resource", 317
)
_TAINT = _Value(
    "the key of a taint of your own: others are of control planes, and of nodes that are not ready",
    lambda value: _KEY.fits(value) and not _OF_CLUSTER.fullmatch(value),
)
_EXPRESSIONS = [
    {
        "key": _KEY,
        "operator": _one_of("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
        "values": [_LABEL],
    }
]
_NODES = {"matchExpressions": _EXPRESSIONS, "matchFields": [{**_EXPRESSIONS[0], "values": [_OBJECT]}]}
_PODS = {
    "labelSelector": {"matchLabels": _Table(_KEY, _LABEL), "matchExpressions": _EXPRESSIONS},
    "topologyKey": _KEY,
    "matchLabelKeys": [_KEY],
    "mismatchLabelKeys": [_KEY],
}
_WEIGHT = _whole(1, 100)
_OF_PODS = {_REQUIRED: [_PODS], _PREFERRED: [{"weight": _WEIGHT, "podAffinityTerm": _PODS}]}
_AMOUNTS = _Table(_RESOURCE, _AMOUNT)
_FIELDS: Object = {
    "metadata": {"annotations": _Table(_OPEN_KEY, _TEXT), "labels": _Table(_OPEN_KEY, _LABEL)},
    "spec": {
        "tolerations": [
            {
                "key": _TAINT,
                "operator": _one_of("Exists", "Equal"),
                "value": _LABEL,
                "effect": _one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
                "tolerationSeconds": _whole(0, 2**31 - 1),
            }
        ],
        "imagePullSecrets": [{"name": _OBJECT}],
        "affinity": {
            "nodeAffinity": {
                _REQUIRED: {"nodeSelectorTerms": [_NODES]},
                _PREFERRED: [{"weight": _WEIGHT, "preference": _NODES}],
            },
            "podAffinity": _OF_PODS,
            "podAntiAffinity": _OF_PODS,
        },
        "containers": [{"name": _OBJECT, "resources": {"requests": _AMOUNTS, "limits": _AMOUNTS}}],
    },
}
_NEEDED = {"spec.tolerations": "key", "spec.imagePullSecrets": "name"}
_OPTIONS = {
    "spec.nodeSelector": "--node-selector",
    "spec.priorityClassName": "--priority-class",
    "spec.serviceAccountName": "--service-account",
    "spec.terminationGracePeriodSeconds": "--grace",
    "spec.volumes": "--volume",
    "spec.securityContext.fsGroup": "--fs-group",
    "spec.containers[0].env": "--env",
    "spec.containers[0].image": "--image",
}


def read_patch(text: str) -> Object:
    """Read a patch that is kept as JSON; {}: there is none.

    Raises:
        UsageError: the message has the path of the first field that is refused.
    """
    if not text:
        return {}
    if len(text) > _MAX_CHARACTERS:
        raise UsageError(f"--pod-patch takes at most {_MAX_CHARACTERS:,} characters", got=len(text))
    found = parse_json(text.encode(errors="replace"), name="The patch of the pods")
    _check(found, _FIELDS, "")
    containers = (found.get("spec") or {}).get("containers") or []
    if len(containers) > 1:
        raise _refused("spec.containers[1]", "a pod has one container")
    return found


def requests_of(text: str) -> dict[str, str]:
    """Return the amounts that a patch asks for each pod, by resource: a limit stands for its request."""
    (container,) = (read_patch(text).get("spec") or {}).get("containers") or [{}]
    resources = container.get("resources", {})
    amounts = {**resources.get("limits", {}), **resources.get("requests", {})}
    return {name: str(amount) for name, amount in amounts.items()}


def _check(value: Any, rule: Any, path: str) -> None:  # Any: JSON; a part of _FIELDS
    """Refuse a value that a rule does not know, by its path."""
    if isinstance(rule, _Value):
        if not rule.fits(value):
            raise _refused(path, f"it takes {rule.says}", value)
        return
    kind, what = (list, "a list") if isinstance(rule, list) else (dict, "a table")
    if not isinstance(value, kind) or not 0 < len(value) <= _MAX_ENTRIES:
        raise _refused(path or "the file", f"it takes {what} with 1 to {_MAX_ENTRIES} entries", value)
    if isinstance(value, list):
        for index, one in enumerate(value):
            _check(one, rule[0], f"{path}[{index}]")
            if (needed := _NEEDED.get(path)) and needed not in one:
                raise _refused(f"{path}[{index}]", f"it has no {needed}")
        return
    for key, one in value.items():
        below = f"{path}.{key}" if path else str(key)
        _check(one, _rule_of(key, rule, path, below), below)


def _rule_of(key: str, rule: Any, path: str, below: str) -> Any:  # Any: a part of _FIELDS
    """Return the rule of an entry of a table.

    Raises:
        UsageError: the table takes no such entry.
    """
    if isinstance(rule, _Table):
        if not rule.key.fits(key):
            raise _refused(below, f"{path} takes {rule.key.says}")
        return rule.value
    if key not in rule:
        option = _OPTIONS.get(below)
        known = f"{path or 'a patch'} takes {', '.join(rule)}"
        raise _refused(below, f"{option} sets it" if option else known)
    return rule[key]


_ABSENT = object()


def _refused(path: str, why: str, value: Any = _ABSENT) -> UsageError:  # Any: JSON
    got = "" if value is _ABSENT else f", not {str(value)[:80]!r}"
    return UsageError(f"--pod-patch: {path[:200]} is refused: {why}{got}")


def merged(template: Mapping[str, Any], text: str) -> Object:  # Any: JSON
    """Return a pod template with a patch.

    The template's own annotations, labels, tolerations and excluded nodes stay.

    Raises:
        UsageError: the patch gives an amount that an option has set, or names another container.
    """
    patch, found = read_patch(text), deepcopy(dict(template))
    meta, spec, of_spec = found["metadata"], found["spec"], patch.get("spec") or {}
    for key, values in (patch.get("metadata") or {}).items():
        meta[key] = {**values, **meta.get(key, {})}
    for key in ("tolerations", "imagePullSecrets"):
        if key in of_spec:
            spec[key] = [*spec.get(key, []), *of_spec[key]]
    if "affinity" in of_spec:
        spec["affinity"] = _affinity(of_spec["affinity"], spec.get("affinity"))
    for given in of_spec.get("containers", []):
        _add_resources(spec["containers"][0], given)
    return found


def _affinity(wanted: Object, own: Object | None) -> Object:
    """Return an affinity; each term of nodes, of which one must hold, also has the nodes that get no pod."""
    found = deepcopy(wanted)
    if own is not None:
        (term,) = own["nodeAffinity"][_REQUIRED]["nodeSelectorTerms"]
        terms = found.setdefault("nodeAffinity", {}).setdefault(_REQUIRED, {"nodeSelectorTerms": [{}]})
        for one in terms["nodeSelectorTerms"]:
            one["matchFields"] = [*one.get("matchFields", []), *term["matchFields"]]
    return found


def _add_resources(container: Object, given: Object) -> None:
    path = "spec.containers[0]"
    if given.get("name", container["name"]) != container["name"]:
        raise _refused(f"{path}.name", f"the container is {container['name']}", given["name"])
    resources = dict(container["resources"])
    for kind, amounts in given.get("resources", {}).items():
        own = resources.get(kind, {})
        if taken := [name for name in amounts if name in own]:
            raise _refused(f"{path}.resources.{kind}.{taken[0]}", "an option of the pods sets it")
        resources[kind] = {**own, **{name: str(amount) for name, amount in amounts.items()}}
    container["resources"] = resources
