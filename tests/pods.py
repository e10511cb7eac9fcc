"""Pods on emulated nodes: our network definitions run by the real CNI plugins, as Multus runs them.

A node is an emulated host, a pod a network namespace. Multus reads the annotation of a pod, and runs the
plugins of each definition in the namespace of the node with CNI_COMMAND=ADD; each gets the result of the one
before (github.com/containernetworking/cni, SPEC.md, sections 3 and 4). Debian's package has no `whereabouts`:
`host-local` stands in, with a folder that all nodes share.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.core import env
from penstock.core.errors import PenstockError
from penstock.core.network.probe import probe_nics
from penstock.launch.local import JobOutcome, RankProcess, run_at
from penstock.launch.pod_networks import ANNOTATION, Attachment, PodNetwork, declared
from penstock.launch.pods.check import check_networks
from penstock.launch.render.attach import attach
from penstock.netlab import namespaces
from penstock.netlab.hosts import Hosts, why_not
from penstock.netlab.namespaces import read_counters

Values = Mapping[str, Any]  # Any: JSON

_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")
_PLUGINS = ("macvlan", "host-device", "tuning", "sbr", "host-local", "static")
_TIMEOUT_S = 60.0


def _plainly(error: BaseException) -> tuple[str, int]:
    return f"{type(error).__name__}: {error}", 1


def plugin_folder() -> str:
    """Return the folder of the CNI plugins; empty if they are not here."""
    found = (folder for folder in _FOLDERS if all(shutil.which(name, path=folder) for name in _PLUGINS))
    return next(found, "")


def why_no_pods() -> str:
    """Return why no pods can be made here; "" if they can."""
    if not plugin_folder():
        return "NO CNI: install containernetworking-plugins; no card was put into a pod"
    return why_not()


class Pod:
    """Network namespace with the cards of one pod.

    Args:
        node: enters the namespace of its node.
        folder: where addresses that were given out are noted, for all nodes.
    """

    def __init__(self, name: str, node: Callable[[], AbstractContextManager[None]], folder: Path) -> None:
        self.name = name
        self.namespace = namespaces.new_namespace()
        """Descriptor that holds the namespace."""
        self.addresses: dict[str, list[str]] = {}
        """Interface -> addresses with prefix length, as the plugins returned them."""
        self._node, self._folder = node, folder

    def inside(self) -> AbstractContextManager[None]:
        """Move the calling thread, and processes it starts, into the pod's network."""
        return namespaces.inside(self.namespace)

    def run(self, *words: str) -> str:
        """Run a command in the pod's network; return what it printed."""
        with self.inside():
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def add(self, attachment: Attachment) -> None:
        """Attach the cards of the annotation, each by its plugins in turn.

        Raises:
            PenstockError: a plugin failed.
        """
        definitions = {found["metadata"]["name"]: found for found in attachment.objects}
        for entry in json.loads(attachment.annotations[ANNOTATION]):
            config = json.loads(definitions[entry["name"]]["spec"]["config"])
            result = self._chain(config, entry["interface"])
            self.addresses[entry["interface"]] = [ip["address"] for ip in result["ips"]]

    def _chain(self, config: Values, interface: str) -> Values:
        result: Values = {}
        for plugin in config["plugins"]:
            given = {**plugin, "name": config["name"], "cniVersion": config["cniVersion"]}
            if "ipam" in given and given["ipam"]["type"] == "whereabouts":
                ranges = [[{"subnet": given["ipam"]["range"]}]]
                given["ipam"] = {"type": "host-local", "ranges": ranges, "dataDir": str(self._folder)}
            if result:
                given["prevResult"] = result
            result = self._plugin(plugin["type"], given, interface)
        return result

    def _plugin(self, kind: str, config: Values, interface: str) -> Values:
        variables = {
            "CNI_COMMAND": "ADD",
            "CNI_CONTAINERID": self.name,
            "CNI_NETNS": f"/proc/self/fd/{self.namespace}",
            "CNI_IFNAME": interface,
            "CNI_PATH": plugin_folder(),
        }
        with self._node():
            done = subprocess.run(
                [str(Path(plugin_folder()) / kind)],
                input=json.dumps(config),
                env={**os.environ, **variables},
                capture_output=True,
                text=True,
                pass_fds=[self.namespace],
                timeout=_TIMEOUT_S,
            )
        if done.returncode:
            raise PenstockError(f"The CNI plugin {kind} failed: {done.stdout}{done.stderr}", got=config)
        found: Values = json.loads(done.stdout)
        return found


class Pods(Sequence[Pod]):
    """A pod on each emulated node; `run` and `sent_bytes` are as those of `Hosts`."""

    def __init__(self, pods: Sequence[Pod], hosts: Hosts, networks: Sequence[PodNetwork]) -> None:
        self._pods, self._networks = pods, networks
        self.topology = hosts.topology

    def __getitem__(self, index: Any) -> Any:  # Any: an index or a slice
        return self._pods[index]

    def __len__(self) -> int:
        return len(self._pods)

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each pod has sent so far on all its cards."""
        found = []
        for pod in self._pods:
            with pod.inside():
                found.append(sum(nic.sent for nic in read_counters().values()))
        return found

    def run(
        self,
        work: Callable[[], int],
        explain: Callable[[BaseException], tuple[str, int]] = _plainly,
        *,
        processes_per_host: int = 1,
        together: bool = True,
    ) -> JobOutcome:
        """Run `work` as a rank in each pod, with the variables that the pod derives from its cards."""
        if processes_per_host != 1 or not together:
            raise NotImplementedError("pods run one rank each, of one job")
        first = [next(iter(pod.addresses.values()))[0].partition("/")[0] for pod in self._pods]
        lines = [f"{address} {pod.name}" for address, pod in zip(first, self._pods, strict=True)]
        names = "\n".join(["127.0.0.1 localhost", *lines, *(f"::ffff:{line}" for line in lines), ""])

        def enter(pod: Pod) -> None:
            namespaces.settle(pod.namespace, host_name=pod.name, names=names)
            settings = check_networks(declared("nad", self._networks), probe_nics())
            env.set_variables({setting.name: setting.value for setting in settings})

        same = {
            "WORLD_SIZE": str(len(self)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": first[0],
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        ranks = [
            RankProcess({**same, "RANK": str(rank), "GROUP_RANK": str(rank)}, lambda pod=pod: enter(pod))  # type: ignore[misc]
            for rank, pod in enumerate(self._pods)
        ]
        return run_at(work, explain, ranks)


@contextmanager
def pods_on(hosts: Hosts, networks: Sequence[PodNetwork], folder: Path) -> Iterator[Pods]:
    """Yield a pod on each emulated node, with a card for each network.

    Args:
        folder: empty; addresses that were given out are noted there.
    """
    nodes = range(hosts.topology.num_hosts)
    attachment = attach("job", "default", "nad", networks, pods=len(nodes), labels={})
    with ExitStack() as stack:
        found = []
        for node in nodes:
            pod = Pod(f"pod{node}", lambda node=node: hosts.inside(node), folder)  # type: ignore[misc]
            stack.callback(os.close, pod.namespace)
            pod.run("ip", "link", "set", "lo", "up")
            pod.add(attachment)
            found.append(pod)
        yield Pods(found, hosts, networks)
