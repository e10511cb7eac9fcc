"""A Slurm of four nodes in plain processes of this machine, for tests and benchmarks; no systemd.

Needs Debian's `slurm-wlm` and `munge`, and root: Slurm starts jobs under the user who submits them.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.ports import free_ports

NODES = ("n0", "n1", "n2", "n3")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")

_CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=100000
SlurmdTimeout=8
SlurmctldTimeout=10
MessageTimeout=5
InactiveLimit=0
KillWait=5
CompleteWait=0
MinJobAge=300
ReturnToService=2
OverTimeLimit=0
{nodes}
PartitionName=low Nodes=n[0-3] Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=40 OverSubscribe=NO
PartitionName=high Nodes=n[0-3] MaxTime=60 State=UP PriorityTier=10 PreemptMode=off OverSubscribe=NO
PartitionName=small Nodes=n[0-3] MaxNodes=2 DefaultTime=30 State=UP PriorityTier=10 PreemptMode=off
PartitionName=closed Nodes=n[0-3] State=DOWN PriorityTier=10 PreemptMode=off
"""


def why_absent() -> str:
    """Return why there can be no Slurm here; empty: there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"SLURM IS NOT INSTALLED ({', '.join(missing)}): apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


class SlurmCluster:
    """The running daemons."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start munged, slurmctld and the nodes; return when all nodes are idle."""
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        config = self.folder / "slurm.conf"
        config.write_text(_CONFIG.format(folder=self.folder, port=ports[0], nodes=nodes))
        self._daemon(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(
                f"--{what}={self.folder}/munge.{what.partition('-')[0]}"
                for what in ("socket", "pid-file", "log-file", "seed-file")
            ),
            "--num-threads=1",
        )
        self._await(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-f", str(config))
        for node in NODES:
            self.start_node(node)
        self._await(lambda: self.states() == ["idle"] * len(NODES), "idle nodes")

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment,
                start_new_session=True,
            )

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._daemon(node, "slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))

    def mend(self) -> None:
        """End all jobs and start the nodes that were killed; return when all nodes are idle."""
        self.run("scancel", "--user=root")
        self._await(self._has_no_jobs, "the end of jobs")
        for node in set(NODES) - set(self.daemons):
            self.start_node(node)
        self._await(lambda: self.states() == ["idle"] * len(NODES), "idle nodes")

    def states(self) -> list[str]:
        """Return the state of each node, in Slurm's words."""
        return self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%t").stdout.split()

    def run(self, *words: str, **options) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm."""
        return subprocess.run(
            words, capture_output=True, text=True, env=self.environment, timeout=120, check=False, **options
        )

    def kill_node(self, node: str) -> None:
        """Kill a node: its daemon, the managers of its steps and their processes, as a power cut."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        _kill(self._tasks(f"SLURMD_NODENAME={node}"))

    def _has_no_jobs(self) -> bool:
        return not self.run("squeue", "-h").stdout.strip()

    def _tasks(self, *variables: str) -> list[int]:
        """Return the processes of jobs that have environment variables, and the managers of their steps."""
        wanted = {f"SLURM_CONF={self.folder}/slurm.conf", "SLURM_CLUSTER_NAME=test", *variables}
        tasks = [pid for pid in _pids() if wanted <= set(_read(pid, "environ").split("\0"))]
        managers = [pid for pid in map(_parent, tasks) if _read(pid, "cmdline").startswith("slurmstepd")]
        return [*dict.fromkeys([*managers, *tasks])]

    def stop(self) -> None:
        """End all jobs and daemons."""
        with suppress(subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            self._await(self._has_no_jobs, "the end of jobs", patience_s=20, must=False)
        _kill(self._tasks())
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _await(self, is_so, what: str, *, patience_s: float = 60.0, must: bool = True) -> None:
        end = time.monotonic() + patience_s
        while not is_so():
            if time.monotonic() > end:
                assert not must, f"{what} did not come: {self._logs()}"
                return
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.out")
        )


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Context manager: a cluster of four idle nodes, below a folder with a short path."""
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _read(pid: int, name: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    return ""


def _parent(pid: int) -> int:
    lines = [line for line in _read(pid, "status").splitlines() if line.startswith("PPid:")]
    return int(lines[0].split()[1]) if lines else 0


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
