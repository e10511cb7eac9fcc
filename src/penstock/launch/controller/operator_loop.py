"""The operator's process: waits until it leads, then lets kopf look at every TrainingRun of a namespace.

kopf watches the objects, sets and removes its finalizer, and calls a timer for each; what is done is in
reconcile.py. A leader that loses its lease ends at once, and is started again by its Deployment.
"""

import asyncio
import logging
import os
import signal
import threading
from contextlib import suppress
from typing import Any

import kopf
from kopf._core.engines.peering import Identity  # kopf exports it under no other name
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.launch.controller.lease import LeaderLease, answer_s
from penstock.launch.controller.reconcile import GROUP, PLURAL, VERSION, Planner, Reconciler
from penstock.launch.engines.kubernetes_api import ANSWER_S, ClusterConnection, connect

_RECONNECT_S = 600.0  # tokens of service accounts are renewed by the kubelet
_log = logging.getLogger("penstock.operator")


def run_operator(namespace: str, plan: Planner, *, identity: str, every_s: float, lease_s: float) -> int:
    """Run until a signal; return the exit code: 0 stopped, 1 another replica leads now.

    Args:
        namespace: of the TrainingRuns and of the lease.
        identity: name of this replica.
        every_s: seconds between two looks at a run.
        lease_s: seconds until the lease of a replica that is gone is taken.
    """
    connection = _Connection(namespace)
    connection.get()  # raises before anything waits
    lease = LeaderLease(identity, lease_s, _Connection(namespace, answer_s(lease_s)).get)
    stopped = threading.Event()

    def stop(_number: int, _frame: object) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    _log.info("waiting namespace=%s replica=%s", namespace, identity)
    if not lease.acquire(stopped):
        return 0
    _log.info("leading namespace=%s replica=%s", namespace, identity)
    lease.keep(_leave)
    try:
        asyncio.run(_kopf(namespace, connection, plan, every_s, identity, stopped))
    finally:
        lease.stop()
        with suppress(PenstockError):  # it runs out by itself
            lease.give_back()
    return 0


def _leave() -> None:
    _log.error("the lease was lost: another replica leads")
    logging.shutdown()
    os._exit(1)  # at once, so that no two act


class _Connection:
    """A connection that is made again now and then, with the token that the pod then has."""

    def __init__(self, namespace: str, answer_s: float = ANSWER_S) -> None:
        self._namespace, self._answer_s, self._lock = namespace, answer_s, threading.Lock()
        self._found: ClusterConnection | None = None
        self._made_at = -_RECONNECT_S

    def renewed(self) -> ClusterConnection:
        """Return a connection with the token that the pod has now."""
        self._made_at = -_RECONNECT_S
        return self.get()

    def get(self) -> ClusterConnection:
        with self._lock:
            now = clock.monotonic()
            if self._found is None or now - self._made_at > _RECONNECT_S:
                self._found, self._made_at = connect(self._namespace, answer_s=self._answer_s), now
            return self._found


def login_of(config: SingleConfig) -> kopf.ConnectionInfo:
    """Return for kopf what lightkube logs in with: certificates, a token, or what a plugin prints."""
    cluster, user = config.cluster, config.user

    def place(path: str | None) -> str | None:
        return str(config.abs_file(path)) if path else None

    scheme, token = None, None
    if (auth := client_adapter.user_auth(user)) is not None:
        request = vars(client_adapter)["httpx"].Request("GET", cluster.server)  # under any of its names
        next(auth.sync_auth_flow(request))
        scheme, _, token = request.headers["Authorization"].partition(" ")
    return kopf.ConnectionInfo(
        server=cluster.server,
        ca_path=place(cluster.certificate_auth) if not cluster.certificate_auth_data else None,
        ca_data=cluster.certificate_auth_data,
        insecure=cluster.insecure,
        scheme=scheme,
        token=token,
        certificate_path=place(user.client_cert) if user and not user.client_cert_data else None,
        certificate_data=user.client_cert_data if user else None,
        private_key_path=place(user.client_key) if user and not user.client_key_data else None,
        private_key_data=user.client_key_data if user else None,
    )


async def _kopf(
    namespace: str,
    connection: _Connection,
    plan: Planner,
    every_s: float,
    identity: str,
    stopped: threading.Event,
) -> None:
    registry = kopf.OperatorRegistry()
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # we write our own events
    settings.scanning.disabled = True  # definitions and namespaces are not ours to watch
    settings.persistence.finalizer = f"{GROUP}/operator"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.watching.server_timeout = 300

    def look(name: str) -> bool:
        try:
            return Reconciler(connection.get(), plan).look(name)
        except PenstockError as error:
            _log.warning("run=%s error=%s", name, error)
            return True

    @kopf.on.login(registry=registry)
    def log_in(**_: Any) -> kopf.ConnectionInfo:  # Any: what kopf hands over
        return login_of(connection.renewed().client.config)

    @kopf.timer(GROUP, VERSION, PLURAL, registry=registry, id="look", interval=every_s, backoff=every_s)
    def reconcile(name: str, **_: Any) -> None:  # Any: what kopf hands over
        look(name)

    @kopf.on.delete(GROUP, VERSION, PLURAL, registry=registry, id="release", backoff=every_s)
    def release(name: str, **_: Any) -> None:  # Any: what kopf hands over
        if look(name):
            raise kopf.TemporaryError("its pods save and end", delay=every_s)

    try:
        await kopf.operator(
            registry=registry,
            settings=settings,
            namespaces=[namespace],
            standalone=True,
            identity=Identity(identity),  # else made of the user's name, which an arbitrary id has none of
            stop_flag=stopped,  # a signal that came before kopf's own handlers
        )
    finally:
        stopped.set()  # a thread waits for it
