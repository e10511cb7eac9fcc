"""Slurm as an engine, through its commands: submit, state, cancel, resize; and both ends of a step.

The batch script runs the supervisor on the first node of the allocation. An attempt is one step: `srun`
starts `penstock launch node` on each node, which forks the node's ranks and reports its end in the run's
folder.
A node without a report is lost.
"""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.core import clock, env
from penstock.core.errors import PenstockError, UsageError
from penstock.core.files import write_atomic
from penstock.core.signals import StopFlag
from penstock.core.units import plural
from penstock.launch.attempt import Explain, Work, judged, port_of, rank_environments, seats_of
from penstock.launch.engines.engine import JobState
from penstock.launch.engines.slurm_growth import ASKED, NodeGrowth
from penstock.launch.engines.slurm_queue import (
    Partition,
    asked_of,
    check_partitions,
    partitions_of,
    wait_reason,
)
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.local import EXIT_STOPPED, run_at
from penstock.launch.node import address_on, prepare, secret_values
from penstock.launch.probe import probe_nics
from penstock.launch.render.rendered import Rendered
from penstock.launch.render.slurm import OUTPUT, render
from penstock.launch.spec import NodeRange, RunSpec
from penstock.launch.supervise import EXIT_NO_PROGRESS, Ended
from penstock.launch.supervisor import supervise_gang

_ANSWER_S = 60.0
_TIMED_OUT = "Socket timed out"
_UNREACHABLE = (
    "configuration source",
    "configuration file",
    "contact slurm controller",
    _TIMED_OUT,
    "Connection refused",
)
"""Parts of what Slurm's commands say where the controller is not known, or does not answer."""
_FORGOTTEN = "Invalid job id"
"""Part of what they say of a job that ended some minutes ago (MinJobAge)."""
_LOOK_S = 1.0
_JOIN_S = 60
"""Seconds that nodes of an elastic job wait for enough of them."""
_AFTER_FIRST_S = 60  # for the other nodes of a step, once one has ended


class SlurmUnreachable(PenstockError):
    """Slurm's controller does not answer, or is not known here."""


class SlurmSilent(SlurmUnreachable):
    """Slurm's controller was asked for something and did not answer in time: it may do it nevertheless."""


def submit(spec: RunSpec, folder: JobFolder, rendered: Rendered) -> str:
    """Write the files and submit the job; return its id. If Slurm refuses, everything is as before.

    Raises:
        SlurmSilent: Slurm may have taken the job, whose files stay: `supervise` makes it known if it starts.
        PenstockError: there is no sbatch, or Slurm refused the job.
    """
    _find("sbatch")
    check_queue(spec)
    check_secrets(spec)
    folder.make()
    folder.forget()
    written = [*map(Path, rendered.files), folder.path / "spec.json"]
    before = {path: path.read_bytes() if path.is_file() else None for path in written}
    try:
        for path, content in rendered.files.items():
            write_atomic(Path(path), content)
        folder.write_spec(spec)
        ident = _slurm(*rendered.commands[0]).strip().partition(";")[0]
    except SlurmSilent:
        ident = _queued_as(rendered.commands[0][-1])
        if not ident:
            raise SlurmSilent(
                f"Slurm did not answer sbatch, and may have taken the job: the files in {folder.path} stay",
                fix=f"Look for it: squeue --me --name={spec.name}. If it is there it runs as submitted, and "
                "`penstock launch status` knows it from its start on; if not, launch it again.",
            ) from None
    except BaseException:
        for kept, old in before.items():
            kept.unlink(missing_ok=True) if old is None else write_atomic(kept, old)
        raise
    folder.write_job(Job(engine="slurm", ident=ident, host=spec.queue, submitted_at=clock.utc_now()))
    folder.log_event("submitted", cause=f"to Slurm, job {ident}", nodes=str(spec.nodes))
    return ident


def _queued_as(script: str) -> str:
    """Return the id of this user's newest job of a script in the queue; "" there is none, or no answer."""
    found = []
    with suppress(PenstockError):
        for line in _slurm("squeue", "--me", "--noheader", "--format=%i|%o").splitlines():
            ident, _, command = line.strip().partition("|")
            if command == script:
                found.append(ident)
    return max(found, key=int, default="")


def check_secrets(spec: RunSpec) -> None:
    """Refuse a run whose secrets are variables that this shell, which hands them on, does not have.

    Raises:
        UsageError: the message names the variable.
    """
    secret_values([secret for secret in spec.secrets if secret.source.startswith("env:")])


def checked_by_slurm(rendered: Rendered) -> str:
    """Return what `sbatch --test-only` says of the script.

    Raises:
        PenstockError: Slurm would refuse it.
    """
    if shutil.which("sbatch") is None:
        return "sbatch is not on this machine: the script was not tested (sbatch --test-only)"
    (script,) = [text for path, text in rendered.files.items() if path.endswith(".sbatch")]
    try:
        done = _answered(["sbatch", "--test-only"], script=script)
        if done.returncode:
            raise _refused("sbatch --test-only", _last_line(done.stderr or done.stdout))
    except SlurmUnreachable as error:
        return f"the script was not tested: {error}"
    return _last_line(done.stderr or done.stdout)


def check_queue(spec: RunSpec) -> None:
    """Refuse a run that its partition can never start.

    Raises:
        UsageError: the partition is unknown, not up, too small, or its time limit is shorter.
    """
    check_partitions(spec, asked_partitions(spec))


def asked_partitions(spec: RunSpec, *, is_tried: bool = False) -> Sequence[Partition]:
    """Return the partitions that a run asks for.

    Args:
        is_tried: return none if Slurm is not here, or does not answer.

    Raises:
        UsageError: there is none of that name.
        PenstockError: Slurm is not here, or does not answer.
    """
    try:
        shown = _slurm("scontrol", "--all", "--oneliner", "show", "partition")
        config = _slurm("scontrol", "show", "config")
    except PenstockError:
        if is_tried:
            return ()
        raise
    return asked_of(spec, partitions_of(shown, config))


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
    restart = env.variable("SLURM_RESTART_COUNT") or "0"
    nodes = env.variable("SLURM_NODELIST")
    if not folder.has_job() or folder.job().ident != ident:  # Slurm did not answer the submit
        folder.write_job(Job(engine="slurm", ident=ident, host=spec.queue, submitted_at=clock.utc_now()))
    folder.log_event("allocated", cause=f"job {ident} has {nodes}", requeues=int(restart))
    store = None
    try:
        gang = _Steps(folder, ident, restart)
        if spec.networks:
            gang.host = address_on(spec.networks, probe_nics())
        if spec.nodes.is_elastic:
            from penstock.launch.elastic_agent import start_store  # torch

            store, gang.store_port = start_store(gang.host)
            gang.growth = NodeGrowth(
                spec,
                folder,
                job=ident,
                host=lambda: gang.host or _address_of(env.variable("SLURMD_NODENAME")),
                port=gang.store_port,
                run=_slurm,
            )
        code = supervise_gang(spec, folder, gang, flag, can_requeue=True)
        if gang.growth:
            gang.growth.end()
        return code
    finally:
        if store is not None:
            store.kill()
            store.join()


def _address_of(node: str) -> str:
    """Return the address by which Slurm reaches a node."""
    shown = _slurm("scontrol", "--oneliner", "show", "node", node)
    return next(
        (word.removeprefix("NodeAddr=") for word in shown.split() if word.startswith("NodeAddr=")), node
    )


class _Steps:
    """Attempts as steps of this job."""

    def __init__(self, folder: JobFolder, ident: str, restart: str) -> None:
        self._folder, self._ident, self._restart = folder, ident, restart
        self._step: subprocess.Popen[bytes] | None = None
        self._attempt, self._spec = "", folder.spec()
        self.store_port, self.host = 0, ""
        self.growth: NodeGrowth | None = None
        self._is_stopping = False
        self._signals: list[subprocess.Popen[bytes]] = []

    def start(self, spec: RunSpec, attempt: int) -> None:
        self._spec, self._is_stopping = spec, False
        self._attempt = f"{self._ident}.{self._restart}.{attempt}"
        port = self.store_port or port_of(int(self._ident), 100 * int(self._restart) + attempt)
        options = [
            "--ntasks-per-node=1",
            f"--ntasks={_num_nodes(spec)}",  # else SLURM_NTASKS counts, of the shell that submitted
            "--kill-on-bad-exit=0",
            f"--wait={_AFTER_FIRST_S}",
            "--input=none",
            "--cpu-bind=none",
        ]
        options += ["--no-kill"] if spec.nodes.is_elastic else []
        node = [
            "-m",
            "penstock",
            "launch",
            "node",
            spec.run_dir,
            "--attempt",
            self._attempt,
            "--port",
            str(port),
            *(["--host", self.host] if self.host else []),
        ]
        self._step = subprocess.Popen(["srun", *options, spec.python, *node], stdin=subprocess.DEVNULL)

    def poll(self) -> Ended | None:
        self._signals = [one for one in self._signals if one.poll() is None]
        if self._step is None or self._step.poll() is None:
            if self.growth and not self._is_stopping:
                self.growth.look()
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
        self._is_stopping = True
        # To all steps of the job and not to the script. srun itself would take SIGTERM for a cancellation.
        self._signal("TERM")

    def kill(self) -> None:
        self._signal("KILL")
        if self._step is not None and self._step.poll() is None:
            self._step.kill()

    def _signal(self, name: str) -> None:
        """Send a signal to all steps: those of nodes that joined by other jobs would go on by themselves.

        Nothing waits for Slurm's answer, which may take a minute.
        """
        idents = [self._ident, *(self.growth.idents if self.growth else ())]
        words = ["scancel", "--quiet", f"--signal={name}", *idents]
        self._signals.append(subprocess.Popen(words, stdin=subprocess.DEVNULL))


def _num_nodes(spec: RunSpec) -> int:
    """Return the number of nodes of this job's allocation."""
    return int(env.variable("SLURM_NNODES") or spec.nodes.most)


def ended_of(reports: Sequence[dict[str, Any]], *, num_nodes: int, srun_code: int, is_elastic: bool) -> Ended:
    """Return how a step ended, from the reports of its nodes.

    >>> ended_of([{"node": 0, "code": 75}], num_nodes=2, srun_code=137, is_elastic=False).cause
    '1 node of 2 (1) did not report an end: lost'
    """
    codes = [int(report["code"]) for report in reports]
    missing = sorted(set(range(num_nodes)) - {int(report["node"]) for report in reports})
    if is_elastic and codes:  # lost nodes are the others' affair
        code = next((c for c in (0, EXIT_NO_PROGRESS, 2, EXIT_STOPPED) if c in codes), codes[0])
        lost = bool(missing) and code not in (0, EXIT_NO_PROGRESS, 2, EXIT_STOPPED)
        return Ended(code=code, newest=-1, cause=_cause_of(reports, code), lost_node=lost)
    if missing:
        names = ", ".join(map(str, missing))
        said = f"{plural(len(missing), 'node')} of {num_nodes} ({names}) did not report an end: "
        said += "lost" if codes else f"srun ended with {srun_code}"
        return Ended(code=1, newest=-1, cause=said, lost_node=True)
    failed = [code for code in codes if code not in (0, EXIT_STOPPED)]
    code = failed[0] if failed else max(codes)
    return Ended(code=code, newest=-1, cause=_cause_of(reports, code))


def _cause_of(reports: Sequence[dict[str, Any]], code: int) -> str:
    if code in (0, EXIT_STOPPED):
        return ""
    said = [
        str(report.get("cause", "")) for report in reports if int(report["code"]) not in (0, EXIT_STOPPED)
    ]
    return next((cause for cause in said if cause and "lost contact" not in cause), said[0] if said else "")


def run_node(
    spec: RunSpec,
    folder: JobFolder,
    work: Work,
    explain: Explain,
    *,
    attempt: str,
    host: str,
    port: int,
    first_node: int = 0,
) -> int:
    """Run one node of a step; return its exit code.

    Args:
        host: address of the rendezvous; empty: that of the first node, as Slurm knows it.
        first_node: number of this step's first node in the run's events.

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
    try:
        prepare(spec)
        if spec.nodes.is_elastic:
            from penstock.launch.elastic_agent import run_elastic_node  # torch

            code = run_elastic_node(
                spec,
                folder,
                node=first_node + task.node,
                host=host or task.address,
                port=port,
                work=work,
                explain=explain,
                join_s=_JOIN_S + (2 * round(spec.grace_s) if first_node else 0),  # others save first
                gone_code=EXIT_STOPPED if first_node else 1,  # the run ended, or is requeued
            )
        else:
            environments = rank_environments(
                node=task.node,
                num_nodes=task.num_nodes,
                processes=spec.processes,
                address=host or task.address,
                port=port,
            )
            seats = seats_of(environments, folder.log_of, f"{clock.utc_now()} node {task.host}")
            outcome = judged(run_at(work, explain, seats))
            code, cause = outcome.code, " ".join(outcome.messages)
    except PenstockError as error:
        code, cause = error.exit_code, str(error)
        raise
    finally:
        folder.log_event(
            "node_ended", node=first_node + task.node, host=task.host, attempt=attempt, code=code, cause=cause
        )
    return code


class _Slurm:
    def state(self, job: Job, folder: JobFolder) -> JobState:
        """Return what squeue says, or the job's end.

        Raises:
            PenstockError: Slurm does not answer, so nobody knows.
        """
        found = _of_job("squeue", "--noheader", f"--jobs={job.ident}", "--format=%T|%r|%S|%N")
        if found.strip():
            status, reason, begin, nodes = (found.strip().splitlines()[0].split("|") + [""] * 3)[:4]
            if status != "PENDING":
                said = f"on {nodes}" if nodes else f"Slurm's reason: {reason}"
                return JobState(is_live=True, status=status, reason=said)
            known = wait_reason(reason)
            said = f"Slurm's reason: {reason}" + (f" ({known.meaning})" if known else "")
            if known and known.remedy:
                said += f": {known.remedy.format(job=job.ident)}"
                return JobState(is_live=True, status=status, reason=said, is_stuck=True)
            said += "" if begin in ("N/A", "") else f"; expected to start at {begin}"
            return JobState(is_live=True, status=status, reason=said)
        shown = _of_job("scontrol", "--oneliner", "show", "job", job.ident)
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        status = fields.get("JobState", "ENDED")
        said = f"exit code {fields['ExitCode'].partition(':')[0]}" if "ExitCode" in fields else ""
        if said and status != "COMPLETED":
            said += f"; its script said why in {folder.path / OUTPUT}"
        return JobState(is_live=False, status=status, reason=said or "Slurm no longer knows the job")

    def cancel(self, job: Job, folder: JobFolder, *, now: bool) -> str:
        """Stop the job for good: after saving, by the script, if it runs."""
        state = self.state(job, folder)
        if not state.is_live:
            raise PenstockError(f"Job {job.ident} has ended already: {state.status}, {state.reason}")
        folder.ask_to_stop()
        if now or state.status != "RUNNING":
            joining = [str(event["joining"]) for event in folder.events() if event["event"] == ASKED]
            _slurm("scancel", "--quiet", job.ident, *joining)
            return f"cancelled job {job.ident}, which was {state.status}"
        _slurm("scancel", "--batch", "--signal=USR1", job.ident)
        end = clock.monotonic() + folder.spec().grace_s + _ANSWER_S
        while True:
            with suppress(SlurmUnreachable):  # it was told, and a controller may be busy for a while
                state = self.state(job, folder)
                if not state.is_live:
                    break
            if clock.monotonic() > end:
                raise PenstockError(
                    f"Job {job.ident} is still {state.status}",
                    fix="See `penstock launch status`; --now cancels it without saving.",
                )
            clock.sleep(_LOOK_S)
        if state.status != "COMPLETED":
            return f"job {job.ident} ended: {state.status}, {state.reason}"
        return f"job {job.ident} stopped after saving"

    def resize(self, job: Job, folder: JobFolder, nodes: NodeRange) -> str:
        """Stop the job after saving, and submit it for another number of nodes."""
        spec = folder.spec().resized(nodes)
        check_secrets(spec)
        check_queue(spec)
        rendered = render(spec)
        checked_by_slurm(rendered)  # before anything is stopped
        done = self.cancel(job, folder, now=False)
        ident = submit(spec, folder, rendered)
        return f"{done}; submitted job {ident} for {nodes} nodes"


def _find(command: str) -> None:
    if shutil.which(command) is None:
        raise PenstockError(
            f"There is no {command} on this machine, so nothing was submitted",
            fix="Type the command where Slurm's commands are, on a login node; --dry-run works without.",
        )


def _slurm(*words: str, is_tried: bool = False, as_new: bool = False) -> str:
    """Run a command of Slurm; return what it prints.

    Args:
        is_tried: return "" if it fails.
        as_new: without the variables of the job that this process is in.
    """
    _find(words[0])
    variables = env.variables("")
    if as_new:
        variables = {k: v for k, v in variables.items() if not k.startswith("SLURM") or k == "SLURM_CONF"}
    done = _answered(words, variables=variables)
    if done.returncode and not is_tried:
        raise _refused(words[0], _last_line(done.stderr or done.stdout))
    return "" if done.returncode else done.stdout


def _of_job(*words: str) -> str:
    """Run a query about a job; return what it prints, "" if Slurm no longer knows the job.

    Raises:
        PenstockError: anything else went wrong, so the job may run.
    """
    _find(words[0])
    done = _answered(words)
    said = _last_line(done.stderr or done.stdout)
    if done.returncode and _FORGOTTEN not in said:
        raise _refused(words[0], said)
    return "" if done.returncode else done.stdout


def _answered(
    words: Sequence[str], *, script: str | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, input=script, capture_output=True, text=True, check=False, timeout=_ANSWER_S, env=variables
        )
    except subprocess.TimeoutExpired:
        raise SlurmSilent(
            f"Slurm did not answer {words[0]} within {_ANSWER_S:g} s", fix="Ask `scontrol ping`."
        ) from None


def _refused(command: str, said: str) -> PenstockError:
    if any(words in said for words in _UNREACHABLE):
        error = SlurmSilent if _TIMED_OUT in said else SlurmUnreachable
        return error(
            f"{command} cannot reach Slurm: {said.partition('fatal: ')[2] or said}",
            fix="Type it on a login node, or name the cluster by SLURM_CONF; `scontrol ping` asks it.",
        )
    said = said.removeprefix("sbatch: ").removeprefix("error: ").removeprefix("allocation failure: ")
    fix = "Correct the option that it names; nothing was submitted."
    return PenstockError(
        f"{command} refused: {said}",
        fix=fix if command.startswith("sbatch") else "Ask `scontrol ping`, and try again.",
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


ENGINE = _Slurm()
