"""Steps of a Slurm job: the supervisor in the batch script starts them, and each node of one runs its ranks.

An attempt is one step: `srun` starts `penstock launch node` on each node, which forks the node's ranks and
reports its end in the run's folder. A node without a report is lost.
"""

import signal
import subprocess
from collections.abc import Sequence
from math import inf
from typing import Any

from penstock.core import clock, env
from penstock.core.errors import PeerLost, PenstockError, UsageError
from penstock.core.network.probe import probe_nics
from penstock.core.signals import StopFlag
from penstock.core.units import plural
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.local import EXIT_STOPPED, run_at
from penstock.launch.nodes.attempt import Explain, Work, judged, port_of, rank_environments, rank_processes
from penstock.launch.nodes.elastic_agent import NodeSettings, run_elastic_node
from penstock.launch.nodes.node import address_on, prepare
from penstock.launch.nodes.supervisor import supervise_gang
from penstock.launch.rendezvous.server import start_server
from penstock.launch.rendezvous.signed import check_key, new_key
from penstock.launch.spec import RunSpec
from penstock.launch.supervise import FINAL_CODES, Ended

_JOIN_S = 60
"""Seconds that nodes of an elastic job wait for enough of them."""
_AFTER_FIRST_S = 60  # for the other nodes of a step, once one has ended
_STOP_INTERVAL_S = 5.0
"""Interval at which SIGTERM is sent again to a step that has not ended: Slurm drops a signal to a task that
it is starting."""
_SRUN_ENDS_S = 20.0  # in which `srun` kills its step: less than Slurm's KillWait, which ends the script


def supervise(spec: RunSpec, folder: JobFolder, flag: StopFlag) -> int:
    """Supervise the run inside its allocation: the batch script's part; return the script's code.

    Raises:
        UsageError: this is not a batch job.
    """
    ident = env.variable("SLURM_JOB_ID")
    if not ident.isdecimal():
        raise UsageError(
            "`penstock launch supervise` is for the batch script that `penstock launch slurm` writes",
            fix="Type `penstock launch slurm RECIPE`.",
        )
    restart = env.whole("SLURM_RESTART_COUNT", 0)
    nodes = env.variable("SLURM_NODELIST")
    if not folder.has_job() or folder.job().ident != ident:  # Slurm did not answer the submit
        folder.write_job(Job(engine="slurm", ident=ident, host=spec.queue, submitted_at=clock.utc_now()))
    folder.log_event("allocated", cause=f"job {ident} has {nodes}", requeues=restart)
    server = None
    key = env.take_rendezvous_key() or new_key()
    try:
        gang = _Steps(folder, ident, str(restart), key=check_key(key, name=env.RENDEZVOUS_KEY))
        if spec.networks:
            gang.host = address_on(spec.networks, probe_nics())
        if spec.nodes.is_elastic:
            server, gang.rendezvous_port = start_server(spec.nodes, key=key, address=gang.host)
        return supervise_gang(spec, folder, gang, flag, can_requeue=True)
    finally:
        if server is not None:
            server.kill()
            server.join()


class _Steps:
    """Attempts as steps of this job."""

    def __init__(self, folder: JobFolder, ident: str, restart: str, *, key: str) -> None:
        self._folder, self._ident, self._restart = folder, ident, restart
        self._step: subprocess.Popen[bytes] | None = None
        self._attempt, self._spec = "", folder.spec()
        self._key = key
        self.rendezvous_port, self.host = 0, ""
        self._signals: list[subprocess.Popen[bytes]] = []
        self._stop_at = self._kill_at = inf

    def start(self, spec: RunSpec, attempt: int) -> None:
        self._spec = spec
        self._stop_at = self._kill_at = inf
        self._attempt = f"{self._ident}.{self._restart}.{attempt}"
        port = self.rendezvous_port or port_of(int(self._ident), 100 * int(self._restart) + attempt)
        options = [
            "--ntasks-per-node=1",
            f"--ntasks={_num_nodes(spec)}",  # else SLURM_NTASKS counts, of the shell that submitted
            "--kill-on-bad-exit=0",
            f"--wait={_AFTER_FIRST_S}",
            "--input=none",
            "--cpu-bind=none",
            "--export=ALL",  # the key too, whatever the job itself was given
        ]
        options += ["--no-kill"] if spec.nodes.is_elastic else []
        node = ["-m", "penstock", "launch", "node", spec.run_dir]
        node += ["--attempt", self._attempt, "--port", str(port)]
        node += ["--host", self.host] if self.host else []
        words = ["srun", *options, *spec.node_python, *node]
        variables = {**env.variables(""), env.RENDEZVOUS_KEY: self._key}
        self._step = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=variables)

    def poll(self) -> Ended | None:
        self._signals = [one for one in self._signals if one.poll() is None]
        if self._step is None or self._step.poll() is None:
            if clock.monotonic() > self._stop_at:
                self.stop()
            if self._step is not None and clock.monotonic() > self._kill_at:
                self._step.kill()
            return None
        reports = [
            event
            for event in self._folder.events()
            if event["event"] == "node_ended" and event.get("attempt") == self._attempt
        ]
        return ended_of(
            reports,
            num_nodes=_num_nodes(self._spec),
            srun_code=self._step.returncode,
            is_elastic=self._spec.nodes.is_elastic,
        )

    def stop(self) -> None:
        """Send SIGTERM to all steps of the job; nothing waits for Slurm's answer, which may take a minute.

        The batch script does not receive it. Neither does `srun`, which would treat it as a cancellation.
        """
        words = ["scancel", "--quiet", "--signal=TERM", self._ident]
        self._signals.append(subprocess.Popen(words, stdin=subprocess.DEVNULL))
        self._stop_at = clock.monotonic() + _STOP_INTERVAL_S

    def kill(self) -> None:
        """Terminate `srun`, which kills its step. `scancel --signal=KILL` would cancel the whole job."""
        if self._step is not None:
            self._step.terminate()
        self._stop_at, self._kill_at = inf, clock.monotonic() + _SRUN_ENDS_S


def _num_nodes(spec: RunSpec) -> int:
    """Return the number of nodes of this job's allocation."""
    return env.whole("SLURM_NNODES", spec.nodes.most, least=1)


def ended_of(reports: Sequence[dict[str, Any]], *, num_nodes: int, srun_code: int, is_elastic: bool) -> Ended:
    """Return how a step ended, from the reports of its nodes.

    >>> ended_of([{"node": 0, "code": 75}], num_nodes=2, srun_code=137, is_elastic=False).cause
    '1 node of 2 (1) did not report an end: lost'
    """
    codes = [int(report["code"]) for report in reports]
    failed = sorted((report for report in reports if _has_failed(report)), key=_is_consequence)
    cause = str(failed[0].get("cause", "")) if failed else ""
    missing = sorted(set(range(num_nodes)) - {int(report["node"]) for report in reports})
    if is_elastic and codes:  # lost nodes are the others' affair
        known = (*FINAL_CODES, EXIT_STOPPED)
        code = next((c for c in known if c in codes), codes[0])
        lost = bool(missing) and code not in known
        return Ended(code=code, newest=-1, cause="" if code in (0, EXIT_STOPPED) else cause, lost_node=lost)
    if missing:
        names = ", ".join(map(str, missing))
        said = f"{plural(len(missing), 'node')} of {num_nodes} ({names}) did not report an end: "
        said += "lost" if codes else f"srun ended with {srun_code}"
        return Ended(code=1, newest=-1, cause=said, lost_node=True)
    return Ended(code=int(failed[0]["code"]) if failed else max(codes), newest=-1, cause=cause)


def _has_failed(report: dict[str, Any]) -> bool:
    return int(report["code"]) not in (0, EXIT_STOPPED)


def _is_consequence(report: dict[str, Any]) -> bool:
    return not report.get("cause") or PeerLost.SENTENCE in report["cause"]


def run_node(
    spec: RunSpec,
    folder: JobFolder,
    work: Work,
    explain: Explain,
    *,
    attempt: str,
    host: str,
    port: int,
) -> int:
    """Run one node of a step; return its exit code.

    Args:
        host: address of the rendezvous; empty: that of the first node, as Slurm knows it.

    Raises:
        UsageError: this is not a step.
    """
    task = env.slurm_task()
    if task is None:
        raise UsageError(
            "`penstock launch node` is started by srun, on each node of a job",
            fix="Type `penstock launch slurm RECIPE`.",
        )
    code, cause = 1, ""
    key = env.take_rendezvous_key()
    try:
        prepare(spec)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))  # but while ranks run: it may come again
        if spec.nodes.is_elastic:
            settings = NodeSettings(
                node=task.node,
                host=host or task.address,
                port=port,
                key=check_key(key, name=env.RENDEZVOUS_KEY),
                join_s=_JOIN_S,
            )
            code = run_elastic_node(spec, folder, settings, work, explain)
        else:
            environments = rank_environments(
                node=task.node,
                num_nodes=task.num_nodes,
                processes=spec.processes,
                address=host or task.address,
                port=port,
            )
            ranks = rank_processes(environments, folder.log_of, f"{clock.utc_now()} node {task.host}")
            outcome = judged(run_at(work, explain, ranks))
            code, cause = outcome.code, " ".join(outcome.messages)
    except PenstockError as error:
        code, cause = error.exit_code, str(error)
        raise
    finally:
        folder.log_event(
            "node_ended", node=task.node, host=task.host, attempt=attempt, code=code, cause=cause
        )
    return code
