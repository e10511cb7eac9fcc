"""A real Kubernetes control plane on the loopback, from KUBEBUILDER_ASSETS as with Go's envtest.

etcd and kube-apiserver; with `controllers` also kube-controller-manager and kube-scheduler. Pods are run by
tests/kubelet.py, JobSets by tests/jobset_controller.py. The folder `crds` of the assets holds definitions of
JobSet and others.
"""

import json
import os
import shutil
import ssl
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.ports import free_port, free_ports

ADMIN = "admin-token"
JOBSET = "jobset.x-k8s.io/v1alpha2"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
_KEPT_S = 30.0  # the API server closes idle connections after 90 s
_GOGC = "400"  # Go collects garbage a quarter as often: a fifth less CPU time for some more memory


def binary(name):
    """Return the path of a binary; skips the test, loudly, where it is missing."""
    assets = os.environ.get("KUBEBUILDER_ASSETS", "")
    found = shutil.which(name, path=f"{assets}:{os.environ['PATH']}")
    if not assets or found is None:
        pytest.skip(
            f"NO KUBERNETES: set KUBEBUILDER_ASSETS to a folder with {name}; nothing was asked of a real one"
        )
    return found


@dataclass(frozen=True)
class Cluster:
    """A running API server."""

    url: str
    ca_file: Path

    @cached_property
    def _trust(self):
        return ssl.create_default_context(cafile=str(self.ca_file))

    @cached_property
    def _idle(self):
        return []

    @cached_property
    def _resources(self):
        return {}

    def ask(self, method, path, body=None, *, token=ADMIN, kind="application/json"):
        """Return the status and the JSON of an answer."""
        status, text = self._ask(method, path, None if body is None else json.dumps(body), token, kind)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, {"message": text.decode(errors="replace")}

    def _ask(self, method, path, data, token, kind):
        connection = self._connection()
        try:
            connection.request(method, path, data, {"Authorization": f"Bearer {token}", "Content-Type": kind})
            with connection.getresponse() as answer:
                found = answer.status, answer.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append((time.monotonic(), connection))
        return found

    def _connection(self):
        """Return an open connection that nobody uses, or a new one: a handshake costs more than an answer."""
        while self._idle:
            used_at, found = self._idle.pop()
            if time.monotonic() - used_at < _KEPT_S:
                return found
            found.close()
        host = urlsplit(self.url)
        return HTTPSConnection(host.hostname, host.port, timeout=30, context=self._trust)

    def close(self):
        """Close the connections."""
        while self._idle:
            self._idle.pop()[1].close()

    def path(self, kind, *, api="v1", namespace="default", name=""):
        """Return the path of an object, or of all of a kind; namespace "": of all namespaces."""
        if (api, kind) not in self._resources:
            root = f"/api/{api}" if "/" not in api else f"/apis/{api}"
            status, answer = self.ask("GET", root)
            assert status == 200, answer
            for found in answer["resources"]:
                if "/" not in found["name"]:
                    self._resources[api, found["kind"]] = (root, found["name"], found["namespaced"])
        root, plural, is_namespaced = self._resources[api, kind]
        within = f"/namespaces/{namespace}" if is_namespaced and namespace else ""
        return f"{root}{within}/{plural}{'/' if name else ''}{name}"

    def create(self, found, *, dry_run=False, token=ADMIN):
        """Create an object; returns the status and the answer."""
        namespace = found["metadata"].get("namespace", "default")
        path = self.path(found["kind"], api=found["apiVersion"], namespace=namespace)
        return self.ask("POST", f"{path}{'?dryRun=All' if dry_run else ''}", found, token=token)

    def get(self, kind, name, *, api="v1", namespace="default"):
        """Return an object; None: there is none."""
        status, answer = self.ask("GET", self.path(kind, api=api, namespace=namespace, name=name))
        assert status in (200, 404), answer
        return answer if status == 200 else None

    def all(self, kind, *, api="v1", namespace="default", labels=""):
        """Return the objects of a kind, those with the labels (`name=value,...`)."""
        path = self.path(kind, api=api, namespace=namespace)
        status, answer = self.ask("GET", f"{path}?labelSelector={labels.replace('=', '%3D')}")
        assert status == 200, answer
        return answer["items"]

    def patch(self, kind, name, change, *, api="v1", namespace="default", part=""):
        """Merge a change into an object, or into a part such as `/status`; returns status and answer."""
        path = self.path(kind, api=api, namespace=namespace, name=name)
        return self.ask("PATCH", f"{path}{part}", change, kind=MERGE)

    def delete(self, kind, name, *, api="v1", namespace="default", grace_s=None, policy="Background"):
        """Delete an object; returns status and answer."""
        options = {"propagationPolicy": policy} | ({} if grace_s is None else {"gracePeriodSeconds": grace_s})
        return self.ask("DELETE", self.path(kind, api=api, namespace=namespace, name=name), options)

    def log(self, pod, *, namespace="default"):
        """Return what a pod printed, through the API server and the kubelet."""
        path = self.path("Pod", namespace=namespace, name=pod)
        status, text = self._ask("GET", f"{path}/log", None, ADMIN, "application/json")
        assert status == 200, text
        return text.decode(errors="replace")

    def token_of(self, namespace, account):
        """Return a token of a service account, as Kubernetes mounts it into a pod."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        status, answer = self.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
        assert status == 201, answer
        return answer["status"]["token"]

    def kubeconfig(self, path, *, token=ADMIN, namespace="default"):
        """Write a kubeconfig; returns its path."""
        server = {"server": self.url, "certificate-authority": str(self.ca_file)}
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(json.dumps(config))
        return path

    def install(self, *prefixes):
        """Install the CustomResourceDefinitions of the assets whose file names begin so; wait for them."""
        folder = Path(os.environ["KUBEBUILDER_ASSETS"]) / "crds"
        for prefix in prefixes:
            files = sorted(folder.glob(f"{prefix}*.yaml"))
            if not files:
                pytest.skip(f"NO KUBERNETES: {folder} has no {prefix}*.yaml; nothing was asked of a real one")
            for file in files:
                self.define(yaml.load(file.read_text(), yaml.CSafeLoader))  # a megabyte: the C loader

    def define(self, definition):
        """Install a CustomResourceDefinition, and wait until it is served."""
        status, answer = self.create(definition)
        assert status in (201, 409), answer
        group, name = definition["spec"]["group"], definition["metadata"]["name"]
        plural = definition["spec"]["names"]["plural"]
        (version, *_) = [v["name"] for v in definition["spec"]["versions"] if v["served"]]
        end = time.monotonic() + 60
        while self.ask("GET", f"/apis/{group}/{version}/{plural}")[0] != 200:
            assert time.monotonic() < end, f"{name} is not served"
            time.sleep(0.1)

    def volume(self, claim, folder, *, namespace="default", mode="ReadWriteMany"):
        """Create a claim, bound to a volume that is a folder of this machine."""
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        of_both = {"accessModes": [mode], "storageClassName": ""}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{claim}"},
            "spec": of_both
            | {
                "capacity": {"storage": "1Gi"},
                "hostPath": {"path": str(folder)},
                "claimRef": {"namespace": namespace, "name": claim},
            },
        }
        wanted = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": of_both
            | {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": f"{namespace}-{claim}"},
        }
        for one in (volume, wanted):
            status, answer = self.create(one)
            assert status == 201, answer


@contextmanager
def cluster(folder, *, controllers=False, definitions=()):
    """Run etcd and kube-apiserver until the block ends.

    Args:
        controllers: the whole control plane.
        definitions: see `Cluster.install`; the garbage collector sees those that come later after 30 s.
    """
    etcd, apiserver = binary("etcd"), binary("kube-apiserver")
    rest = [binary("kube-controller-manager"), binary("kube-scheduler")] if controllers else []
    client, peer, port = free_ports(3)
    key = folder / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{ADMIN},admin,1,"system:masters"\n')
    commands = [
        [
            etcd, "--data-dir", folder / "etcd", "--unsafe-no-fsync",
            "--listen-client-urls", f"http://127.0.0.1:{client}",
            "--advertise-client-urls", f"http://127.0.0.1:{client}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        ],
        [
            apiserver, f"--etcd-servers=http://127.0.0.1:{client}", f"--cert-dir={folder / 'certificates'}",
            "--bind-address=127.0.0.1", f"--secure-port={port}", "--insecure-port=0",
            "--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC",
            f"--token-auth-file={tokens}",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            # seconds until pods of a lost node are deleted, 300 elsewhere
            "--default-not-ready-toleration-seconds=1", "--default-unreachable-toleration-seconds=1",
            *([] if controllers else ["--disable-admission-plugins=ServiceAccount"]),
        ],
    ]  # fmt: skip
    with ExitStack() as stack:

        def start(*command):
            log = stack.enter_context((folder / f"{Path(command[0]).name}.log").open("w"))
            words = [str(word) for word in command]
            process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"GOGC": _GOGC})
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        process = [start(*command) for command in commands][-1]
        found = Cluster(f"https://127.0.0.1:{port}", folder / "certificates" / "apiserver.crt")
        stack.callback(found.close)
        deadline = time.monotonic() + 180
        while not _is_ready(found):
            assert process.poll() is None, (folder / "kube-apiserver.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "kube-apiserver.log").read_text()[-3000:]
            time.sleep(0.2)
        found.install(*definitions)
        if controllers:
            config = found.kubeconfig(folder / "admin.kubeconfig")
            of_both = ["--kubeconfig", config, "--leader-elect=false", "--port=0", "--bind-address=127.0.0.1"]
            start(
                rest[0], *of_both, f"--secure-port={free_port()}", f"--cert-dir={folder / 'manager'}",
                f"--service-account-private-key-file={key}", f"--root-ca-file={found.ca_file}",
                "--pvclaimbinder-sync-period=1s",
                "--node-monitor-period=1s", "--node-monitor-grace-period=8s",
                "--concurrent-serviceaccount-token-syncs=2",
            )  # fmt: skip
            start(rest[1], *of_both, f"--secure-port={free_port()}", f"--cert-dir={folder / 'scheduler'}")
            while found.get("ServiceAccount", "default") is None:
                assert time.monotonic() < deadline, (folder / "kube-controller-manager.log").read_text()[
                    -3000:
                ]
                time.sleep(0.2)
        yield found


def _is_ready(found):
    try:
        return found.ask("GET", "/api/v1/namespaces/default")[0] == 200
    except (OSError, ValueError):
        return False
