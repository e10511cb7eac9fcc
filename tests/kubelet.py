"""A kubelet for tests: pods that the real scheduler bound to a node run as processes of this machine.

A pod has mount, PID and host-name namespaces of its own; its root is an overlay over this machine's, so the
"image" is this machine, and what is written outside of volumes is lost with the pod. All pods share the
loopback: each has an address of its own there, and names of a headless service stand in /etc/hosts. A node
may be an emulated host instead, whose cards and address its pods have, as with `hostNetwork`. Left out:
images, limits of CPU and memory, liveness probes, life-cycle hooks, network policies.
"""

import base64
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest

from tests.kubernetes import Cluster

_POLL_S = 0.2
_HEARTBEAT_S = 2.0
_ARBITRARY_USER = 1000670000  # as OpenShift gives
_SOURCES = " ".join(
    sorted(
        {
            str(above)
            for path in (Path(sys.executable), Path(sys.executable).resolve(), Path(__file__))
            for above in path.parents
        }
    )
)
_STRATEGIC = "application/strategic-merge-patch+json"


def why_absent():
    """Return why pods cannot be run here; empty: they can."""
    words = ["unshare", "--mount", "--uts", "--pid", "--fork", "true"]
    if shutil.which("unshare") and subprocess.run(words, capture_output=True, check=False).returncode == 0:
        return ""
    return "NO PODS: `unshare --mount --uts --pid` needs root and namespaces; nothing was run in a pod"


@contextmanager
def nodes(cluster, folder, *names, capacity=()):
    """Run nodes of a cluster until the block ends.

    Args:
        capacity: resources besides 8 CPU cores, 32 GiB and 50 pods, such as `{"nvidia.com/gpu": "8"}`.
    """
    if reason := why_absent():
        pytest.skip(reason)
    found = Nodes(cluster, folder, {"cpu": "8", "memory": "32Gi", "pods": "50", **dict(capacity)})
    try:
        for name in names:
            found.add(name)
        yield found
    finally:
        found.close()


@dataclass(frozen=True)
class NodeNetwork:
    """Network of an emulated host, which the pods of a node share."""

    inside: Callable[[], AbstractContextManager]
    """Moves the calling thread, and processes that it starts, into the network."""
    address: str


class Nodes:
    """Nodes of a cluster, whose pods are processes of this machine."""

    def __init__(self, cluster: Cluster, folder, capacity):
        self._cluster, self._folder, self._capacity = cluster, folder, capacity
        self._beat_at = {}
        self.blind = set()
        self.networks = {}
        self.pods = {}
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.errors = []
        self._addresses = 1
        self._server = _log_server(self, folder)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}),
            threading.Thread(target=self._run),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, name, *, sees_claims=True, network=None, labels=()):
        """Start a node, new or lost before.

        Args:
            sees_claims: False: the folders of claims are empty there.
            network: see `NodeNetwork`; None: the loopback of this machine.
            labels: of a new node, besides its name.
        """
        self.blind.discard(name)
        if not sees_claims:
            self.blind.add(name)
        self.networks[name] = network
        labels = {"kubernetes.io/hostname": name, **dict(labels)}
        status, answer = self._cluster.create(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        )
        assert status in (201, 409), answer
        with self._lock:
            self._beat(name)
        end = time.monotonic() + 60
        while any(taint["effect"] for taint in self._cluster.get("Node", name)["spec"].get("taints", [])):
            assert time.monotonic() < end, self._cluster.get("Node", name)
            time.sleep(0.1)

    def lose(self, name):
        """Kill all processes of a node at once; it is not heard of again."""
        with self._lock:
            del self._beat_at[name]
            for pod in self._pods_of(name):
                pod.kill()
                del self.pods[pod.uid]

    def kill_pod(self, namespace, name):
        """Kill the processes of a pod, as the kernel does when memory is short."""
        with self._lock:
            for pod in self.pods.values():
                if (pod.namespace, pod.name) == (namespace, name):
                    pod.kill_running()

    def close(self):
        """Kill everything."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        for pod in self.pods.values():
            pod.kill()
        assert not self.errors, self.errors

    def address(self):
        """Return an address of the loopback for a pod."""
        self._addresses += 1
        return f"127.0.{1 + self._addresses // 250}.{1 + self._addresses % 250}"

    def log_of(self, namespace, name, container=""):
        """Return the log file of a container; the first one of its pod without a name."""
        with self._lock:
            for pod in self.pods.values():
                if (pod.namespace, pod.name) == (namespace, name):
                    return pod.log_of(container or pod.spec["containers"][0]["name"])
        return None

    def _pods_of(self, name):
        return [pod for pod in self.pods.values() if pod.node == name]

    def _beat(self, name):
        self._beat_at[name] = time.monotonic()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
        change = {
            "status": {
                "capacity": self._capacity,
                "allocatable": self._capacity,
                "conditions": [ready],
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_port}},
            }
        }
        path = self._cluster.path("Node", name=name)
        status, answer = self._cluster.ask("PATCH", f"{path}/status", change, kind=_STRATEGIC)
        if status == 404:  # somebody deleted the node
            del self._beat_at[name]
        else:
            assert status == 200, answer

    def _run(self):
        while not self._ended.wait(_POLL_S):
            try:
                with self._lock:
                    self._look()
            except OSError:  # the API server is away: as a kubelet, go on
                continue
            except Exception as error:
                self.errors.append(repr(error))
                raise

    def _look(self):
        for name, beat_at in list(self._beat_at.items()):
            if time.monotonic() - beat_at > _HEARTBEAT_S:
                self._beat(name)
        wanted = {
            pod["metadata"]["uid"]: pod
            for pod in self._cluster.all("Pod", namespace="")
            if pod["spec"].get("nodeName") in self._beat_at
        }
        for uid in [uid for uid in self.pods if uid not in wanted]:  # deleted by force
            self.pods.pop(uid).kill()
        for uid, pod in wanted.items():
            if uid not in self.pods:
                if pod["status"].get("phase") in ("Succeeded", "Failed"):
                    continue
                self.pods[uid] = _Pod(self._cluster, self, self._folder / "pods" / uid, pod)
            self.pods[uid].look(pod)


class _Pod:
    def __init__(self, cluster, room, folder, found):
        self._cluster, self._room, self._folder = cluster, room, folder
        self.uid, self.name = found["metadata"]["uid"], found["metadata"]["name"]
        self.namespace, self.node = found["metadata"]["namespace"], found["spec"]["nodeName"]
        self.spec, self._found = found["spec"], found
        self._network = room.networks[self.node]
        self.address = self._network.address if self._network else room.address()
        self._policies = {c["name"]: c.get("terminationMessagePolicy") for c in self.spec["containers"]}
        self._todo = list(found["spec"].get("initContainers", []))
        self._running = {}
        self._states, self._restarts = {}, {}
        self._ready = set()
        self._is_started = False
        self._kill_at = None
        self._again_at = {}
        self._told = None
        self._message = ""

    def log_of(self, container):
        """Return the log file of a container."""
        return self._folder / "logs" / f"{container}.log"

    def look(self, found):
        """Bring the processes in line with the object, and its status in line with the processes."""
        self._found = found
        self._reap()
        if "deletionTimestamp" in found["metadata"]:
            self._end(found["metadata"].get("deletionGracePeriodSeconds", 30))
            return
        if not self._is_started or self._todo:
            try:
                self._begin()
            except _MissingError as missing:  # a kubelet waits for what a volume or a variable is made of
                self._message = str(missing)
        self._restart()
        self._probe()
        self._tell()

    def kill(self):
        """Kill all processes."""
        self.kill_running()
        for process in self._running.values():
            process.wait()
        self._running = {}

    def _begin(self):
        if not self._is_started:
            (self._folder / "logs").mkdir(parents=True, exist_ok=True)
            self._volumes = {v["name"]: self._volume(v) for v in self.spec.get("volumes", [])}
            self._name()
            self._is_started = True
            if not self._todo:
                self._start_main()
            else:
                self._start(self._todo[0])
            return
        first = self._todo[0]["name"]
        if first in self._running or first not in self._states:
            return
        if self._states[first]["terminated"]["exitCode"] == 0:
            self._todo.pop(0)
            if self._todo:
                self._start(self._todo[0])
            else:
                self._start_main()

    def _start_main(self):
        for container in self.spec["containers"]:
            self._start(container)

    def _name(self):
        names = [self.name]
        if host := self.spec.get("hostname"):
            names = [host]
            if domain := self.spec.get("subdomain"):
                short = f"{host}.{domain}"
                names += [short, f"{short}.{self.namespace}", f"{short}.{self.namespace}.svc"]
                names += [f"{short}.{self.namespace}.svc.cluster.local"]
        lines = [
            line
            for line in self._room.hosts.read_text().splitlines(keepends=True)
            if names[-1] not in line.split()[1:]
        ]
        places = [self.address]
        if self._network:  # torch's store looks that up, too, and no name server answers there
            places.append(f"::ffff:{self.address}")
        named = [f"{place} {' '.join(names)}\n" for place in places]
        self._room.hosts.write_text("".join([*lines, *named]))  # in place: it is mounted into pods

    def _volume(self, volume):
        folder = self._folder / "volumes" / volume["name"]
        if (claim := volume.get("persistentVolumeClaim")) and self.node not in self._room.blind:
            found = self._get("PersistentVolumeClaim", claim["claimName"])
            held = self._cluster.get("PersistentVolume", found["spec"].get("volumeName", ""))
            return Path(held["spec"]["hostPath"]["path"])
        if path := volume.get("hostPath"):
            return Path(path["path"])
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        if claim:
            return folder
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        for source in sources:
            for name, content in self._files(source).items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(0o755)
        return folder

    def _files(self, source):
        if token := source.get("serviceAccountToken"):
            account = self.spec.get("serviceAccountName", "default")
            return {token["path"]: self._cluster.token_of(self.namespace, account).encode()}
        if down := source.get("downwardAPI"):
            return {one["path"]: self._field(one["fieldRef"]["fieldPath"]).encode() for one in down["items"]}
        for key, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
            if held := source.get(key):
                name = held.get("name") or held.get("secretName")
                found = self._data(kind, name, is_optional=held.get("optional", False))
                items = held.get("items") or [{"key": key, "path": key} for key in found]
                return {one["path"]: found[one["key"]] for one in items if one["key"] in found}
        return {}

    def _data(self, kind, name, *, is_optional=False):
        if is_optional and self._cluster.get(kind, name, namespace=self.namespace) is None:
            return {}
        found = self._get(kind, name)
        texts, coded = found.get("data") or {}, found.get("binaryData") or {}
        if kind == "Secret":
            texts, coded = {}, texts
        return {key: text.encode() for key, text in texts.items()} | {
            key: base64.b64decode(text) for key, text in coded.items()
        }

    def _get(self, kind, name):
        found = self._cluster.get(kind, name, namespace=self.namespace)
        if found is None:
            raise _MissingError(f"{kind} {name} not found")
        return found

    def _field(self, path):
        if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
            return self._found["metadata"].get(keyed[1], {}).get(keyed[2], "")
        values = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self.node,
            "spec.serviceAccountName": self.spec.get("serviceAccountName", "default"),
            "status.podIP": self.address,
            "status.hostIP": "127.0.0.1",
        }
        return values[path]

    def _environment(self, container):
        server = urlsplit(self._cluster.url)
        found = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        found["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        found |= {"HOSTNAME": self.spec.get("hostname", self.name), "HOME": "/"}
        found |= {"KUBERNETES_SERVICE_HOST": server.hostname, "KUBERNETES_SERVICE_PORT": str(server.port)}
        for source in container.get("envFrom", []):
            kind = "ConfigMap" if "configMapRef" in source else "Secret"
            held = source.get("configMapRef") or source["secretRef"]
            data = self._data(kind, held["name"], is_optional=held.get("optional", False))
            found |= {source.get("prefix", "") + key: value.decode() for key, value in data.items()}
        for variable in container.get("env", []):
            value = self._variable(variable)
            if value is not None:
                found[variable["name"]] = _expanded(value, found)
        return found

    def _variable(self, variable):
        source = variable.get("valueFrom")
        if not source:
            return variable.get("value", "")
        if field := source.get("fieldRef"):
            return self._field(field["fieldPath"])
        for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
            if held := source.get(key):
                is_optional = held.get("optional", False)
                found = self._data(kind, held["name"], is_optional=is_optional).get(held["key"])
                if found is None and not is_optional:
                    raise _MissingError(f"{kind} {held['name']} has no key {held['key']}")
                return found and found.decode()
        raise AssertionError(f"the test kubelet does not know {variable}")

    def _start(self, container):
        name = container["name"]
        environment = self._environment(container)
        words = container.get("command", []) + container.get("args", [])
        if not container.get("command"):  # the entry point of our image
            words = ["penstock", *words]
        script = self._folder / f"{name}.sh"
        script.write_text(self._script(container))
        words = [_expanded(word, environment) for word in words]
        inside = self._network.inside() if self._network else nullcontext()
        # The shell opens the log: a test that ends while a pod starts would seem to have left it open.
        logged = ["sh", "-c", 'exec "$@" >>"$0" 2>&1', str(self.log_of(name))]
        self.log_of(name).write_bytes(b"")
        isolated = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        with inside:
            self._running[name] = subprocess.Popen(
                [*logged, *isolated, "sh", "-e", str(script), *words],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self._states[name] = {"running": {"startedAt": _now()}}

    def _script(self, container):
        security = self.spec.get("securityContext", {}) | container.get("securityContext", {})
        user = security.get("runAsUser", _ARBITRARY_USER if security.get("runAsNonRoot") else 0)
        group = security.get("runAsGroup", 0)
        top = self._folder / "root"
        top.mkdir(exist_ok=True)
        lines = [
            f"top={shlex.quote(str(top))}; root=$top/root",
            "mount -t tmpfs tmpfs $top; mkdir $top/upper $top/work $root",
            "mount -t overlay overlay -o lowerdir=/,upperdir=$top/upper,workdir=$top/work $root",
            *(f"mount --rbind {place} $root{place}" for place in ("/dev", "/sys")),
            "mount -t proc proc $root/proc",
            # In the overlay only: any user may read the interpreter and this repository.
            f"for folder in {_SOURCES}; do chmod a+x $root$folder; done",
            "mkdir -p $root/dev/shm $root/etc; touch $root/etc/hosts; chmod 1777 $root/tmp",
            f"mount --bind {shlex.quote(str(self._room.hosts))} $root/etc/hosts",
            *(["rm -f $root/etc/resolv.conf; touch $root/etc/resolv.conf"] if self._network else []),
        ]
        mounts = sorted(container.get("volumeMounts", []), key=lambda mount: mount["mountPath"])
        for mount in mounts:
            source = self._volumes[mount["name"]]
            if part := mount.get("subPath"):
                source = source / part
                if not source.exists():
                    source.mkdir(parents=True)
                    source.chmod(0o777)
            place = shlex.quote(os.path.realpath(mount["mountPath"]))  # /var/run is a link out of the root
            make = "mkdir -p" if source.is_dir() else f'mkdir -p "$(dirname $root{place})"; touch'
            lines.append(f"{make} $root{place}; mount --bind {shlex.quote(str(source))} $root{place}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro $root{place}")
        lines.append(f"hostname {self.spec.get('hostname', self.name)}")
        if security.get("readOnlyRootFilesystem"):
            lines.append("mount -o remount,ro $root")
        work = shlex.quote(container.get("workingDir", "/"))
        enter = f'cd {work} && exec "$@"'
        lines.append(f'exec chroot --userspec={user}:{group} $root sh -c {shlex.quote(enter)} sh "$@"')
        return "\n".join(lines) + "\n"

    def _reap(self):
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[name]
            self._ready.discard(name)
            code = 128 - code if code < 0 else code
            ended = {"exitCode": code, "finishedAt": _now(), "reason": "Error" if code else "Completed"}
            if code and self._policies.get(name) == "FallbackToLogsOnError":
                ended["message"] = self.log_of(name).read_text(errors="replace")[-2048:]
            self._states[name] = {"terminated": ended}
            policy = self.spec.get("restartPolicy", "Always")
            if self._kill_at is None and (policy == "Always" or (policy == "OnFailure" and code)):
                self._again_at[name] = time.monotonic() + 1.0

    def _restart(self):
        for container in [*self._todo[:1], *self.spec["containers"]]:
            name = container["name"]
            if self._again_at.get(name, float("inf")) <= time.monotonic():
                del self._again_at[name]
                self._restarts[name] = self._restarts.get(name, 0) + 1
                self._start(container)

    def _probe(self):
        for container in self.spec["containers"]:
            name, probe = container["name"], container.get("readinessProbe")
            if name not in self._running:
                continue
            if probe is None:
                self._ready.add(name)
            elif "httpGet" in probe:
                port = probe["httpGet"]["port"]
                ports = {p.get("name"): p["containerPort"] for p in container.get("ports", [])}
                try:
                    url = f"http://127.0.0.1:{ports.get(port, port)}{probe['httpGet'].get('path', '/')}"
                    urlopen(url, timeout=2).close()
                    self._ready.add(name)
                except OSError:
                    self._ready.discard(name)

    def _end(self, grace_s):
        if not self._running:
            self._tell()
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
            path = self._cluster.path("Pod", namespace=self.namespace, name=self.name)
            self._cluster.ask("DELETE", path, options)
            return
        now = time.monotonic()
        if self._kill_at is None:
            self._signal(signal.SIGTERM)
        if self._kill_at is None or now + grace_s < self._kill_at:
            self._kill_at = now + grace_s
        if now >= self._kill_at:
            self.kill_running()

    def kill_running(self):
        """Kill the processes; their ends are told."""
        self._signal(signal.SIGKILL)  # and with its first process the whole PID namespace
        for process in self._running.values():
            process.kill()

    def _signal(self, number):
        for process in self._running.values():
            with suppress(OSError, ValueError):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                os.kill(int(children), number)

    def _phase(self):
        first = self._todo[0]["name"] if self._todo else ""
        names = [container["name"] for container in self.spec["containers"]]
        states = [self._states.get(name, {}) for name in names]
        if self._again_at or any("running" in state for state in states):
            return "Running"
        if "terminated" in self._states.get(first, {}) and self._states[first]["terminated"]["exitCode"]:
            return "Failed"
        if all("terminated" in state for state in states):
            return "Failed" if any(state["terminated"]["exitCode"] for state in states) else "Succeeded"
        return "Pending"

    def _tell(self):
        phase = self._phase()
        status = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self._found["metadata"]["creationTimestamp"],
        }
        for key, containers in (
            ("containerStatuses", self.spec["containers"]),
            ("initContainerStatuses", self.spec.get("initContainers", [])),
        ):
            waiting = {"waiting": {"reason": "ContainerCreating", "message": self._message}}
            status[key] = [
                {
                    "name": container["name"],
                    "image": container.get("image", ""),
                    "imageID": "",
                    "ready": container["name"] in self._ready,
                    "restartCount": self._restarts.get(container["name"], 0),
                    "state": self._states.get(container["name"], waiting),
                }
                for container in containers
            ]
        is_ready = phase == "Running" and len(self._ready) == len(self.spec["containers"])
        said = "True" if is_ready else "False"
        status["conditions"] = [{"type": name, "status": said} for name in ("Ready", "ContainersReady")]
        if json.dumps(status) == self._told:
            return
        path = self._cluster.path("Pod", namespace=self.namespace, name=self.name)
        change = {"metadata": {"uid": self.uid}, "status": status}
        code, answer = self._cluster.ask("PATCH", f"{path}/status", change, kind=_STRATEGIC)
        if code in (404, 409):  # deleted meanwhile
            return
        assert code == 200, answer
        self._told = json.dumps(status)


class _MissingError(Exception):
    """What a pod needs is not there yet."""


def _expanded(text, environment):
    def value(match):
        return environment.get(match[1], match[0])

    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", value, text)


def _now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _time_of(number):
    """Return the time before a line of a log: files have none, so it follows from the line's number."""
    return f"2026-01-01T00:00:00.{number:06d}000Z ".encode()


def _log_server(room, folder):
    """Return the kubelet's server, of which the API server asks the logs of pods."""
    key, certificate = folder / "kubelet.key", folder / "kubelet.crt"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kubelet", "-days", "2"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)

    class Logs(BaseHTTPRequestHandler):
        def do_GET(self):
            address = urlsplit(self.path)
            _, kind, *words = address.path.split("/")
            path = room.log_of(*words) if kind == "containerLogs" else None
            if path is None or not path.is_file():
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            is_followed, has_times = (
                parse_qs(address.query).get(name) == ["true"] for name in ("follow", "timestamps")
            )
            number, is_begun = 0, False
            with path.open("rb") as file, suppress(OSError):
                while True:
                    is_last = not is_followed or room.log_of(*words) is None or room._ended.is_set()
                    while line := file.readline():
                        self.wfile.write(_time_of(number) + line if has_times and not is_begun else line)
                        is_begun = not line.endswith(b"\n")
                        number += not is_begun
                    if is_last:
                        return
                    time.sleep(0.1)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Logs)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server
