"""Slurm as an engine, through its commands: submit, state, cancel, resize.

The batch script runs the supervisor on the first node of the allocation (slurm_steps.py).
"""

import shutil
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.core import clock, env
from penstock.core.errors import PenstockError, UsageError
from penstock.core.files import write_atomic
from penstock.launch.engines.engine import JobState, QueuedJob
from penstock.launch.engines.sbatch_options import check_variables
from penstock.launch.engines.slurm_commands import (
    ANSWER_S,
    SlurmSilent,
    SlurmUnreachable,
    find_command,
    job_id,
    query_job,
    run_slurm,
    try_script,
)
from penstock.launch.engines.slurm_queue import (
    Partition,
    asked_of,
    check_partitions,
    partitions_of,
    wait_reason,
)
from penstock.launch.job_folder import LAUNCH_FOLDER, Job, JobFolder
from penstock.launch.nodes.node import secret_values
from penstock.launch.render.rendered import Rendered
from penstock.launch.render.slurm import OUTPUT, SCRIPT, render
from penstock.launch.spec import NodeRange, RunSpec

_POLL_S = 1.0


def submit(spec: RunSpec, folder: JobFolder, rendered: Rendered) -> str:
    """Write the files and submit the job; return its id. If Slurm refuses, everything is as before.

    Raises:
        SlurmSilent: Slurm may have taken the job, whose files stay: `supervise` makes it known if it starts.
        PenstockError: there is no sbatch, or Slurm refused the job.
    """
    find_command("sbatch")
    check_queue(spec)
    check_shell(spec)
    folder.make()
    folder.forget()
    written = [*map(Path, rendered.files), folder.path / "spec.json"]
    before = {path: path.read_bytes() if path.is_file() else None for path in written}
    try:
        for path, content in rendered.files.items():
            write_atomic(Path(path), content)
        folder.write_spec(spec)
        ident = job_id(run_slurm(*rendered.commands[0]))
    except SlurmSilent:
        ident = _queued_as(rendered.commands[0][-1])
        if not ident:
            raise SlurmSilent(
                f"Slurm did not answer sbatch, and may have taken the job: the files in {folder.path} stay",
                fix=f"Look for it: squeue --me --name={spec.name}. If it exists it runs as submitted, and "
                "`penstock launch status` shows it from its start; if not, launch it again.",
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
        for line in run_slurm("squeue", "--me", "--noheader", "--format=%i|%o").splitlines():
            ident, _, command = line.strip().partition("|")
            if command == script:
                found.append(ident)
    return max(found, key=int, default="")


def check_shell(spec: RunSpec) -> None:
    """Refuse a run whose secrets this shell lacks, whose job it changes, or whose setup bash cannot read.

    Raises:
        UsageError: the message names the variable, or the line of the setup.
    """
    if spec.setup:
        done = subprocess.run(["bash", "-n"], input=spec.setup, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()[0].removeprefix("bash: ")
            raise UsageError(f"bash cannot read the setup file: {said}", fix="Correct that line.")
    check_variables(env.variables("SBATCH_", "SLURM_"), spec)
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
        return try_script(script)
    except SlurmUnreachable as error:
        return f"the script was not tested: {error}"


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
        shown = run_slurm("scontrol", "--all", "--oneliner", "show", "partition")
        config = run_slurm("scontrol", "show", "config")
    except PenstockError:
        if is_tried:
            return ()
        raise
    return asked_of(spec, partitions_of(shown, config))


_QUEUED = "%T|%r|%S|%N"


def _queued_state(ident: str, line: str) -> JobState:
    """Return the state of a job in the queue from a line in the form _QUEUED."""
    status, reason, begin, nodes = (line.split("|") + [""] * 3)[:4]
    if status != "PENDING":
        said = f"on {nodes}" if nodes else f"Slurm's reason: {reason}"
        return JobState(is_live=True, status=status, reason=said)
    known = wait_reason(reason)
    said = f"Slurm's reason: {reason}" + (f" ({known.meaning})" if known else "")
    if known and known.remedy:
        said += f": {known.remedy.format(job=ident)}"
        return JobState(is_live=True, status=status, reason=said, is_stuck=True)
    said += "" if begin in ("N/A", "") else f"; expected to start at {begin}"
    return JobState(is_live=True, status=status, reason=said)


class _Slurm:
    def jobs(self, _host: str, known: Collection[str] = ()) -> dict[str, QueuedJob]:
        """Return the jobs in the queue whose script is one of Penstock's: this user's, and the known ones."""
        form, found = f"--format=%i|{_QUEUED}|%o", {}
        lines = run_slurm("squeue", "--me", "--noheader", form).splitlines()
        if others := sorted({*known} - {line.strip().partition("|")[0] for line in lines}):
            lines += query_job("squeue", "--noheader", f"--jobs={','.join(others)}", form).splitlines()
        for line in lines:
            ident, _, rest = line.strip().partition("|")
            state, _, script = rest.partition("|/")
            run, mark, _ = f"/{script}".partition(f"/{LAUNCH_FOLDER}/{SCRIPT}")
            if mark:
                found[ident] = QueuedJob(state=_queued_state(ident, state), run=run)
        return found

    def state(self, job: Job, folder: JobFolder) -> JobState:
        """Return what squeue says, or the job's end.

        Raises:
            PenstockError: Slurm does not answer, so nobody knows.
        """
        found = query_job("squeue", "--noheader", f"--jobs={job.ident}", f"--format={_QUEUED}")
        if found.strip():
            return _queued_state(job.ident, found.strip().splitlines()[0])
        shown = query_job("scontrol", "--oneliner", "show", "job", job.ident)
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        status = fields.get("JobState", "ENDED")
        said = f"exit code {fields['ExitCode'].partition(':')[0]}" if "ExitCode" in fields else ""
        if said and status != "COMPLETED":
            said += f"; its script said why in {folder.path / OUTPUT}"
        return JobState(is_live=False, status=status, reason=said or "Slurm no longer knows the job")

    def cancel(self, job: Job, folder: JobFolder, *, now: bool) -> str:
        """Stop the job for good: after saving, by the script, if it runs."""
        state = self.state(job, folder)
        state.check_stoppable(job)
        folder.ask_to_stop()
        if now or state.status != "RUNNING":
            run_slurm("scancel", "--quiet", job.ident)
            return f"cancelled job {job.ident}, which was {state.status}"
        run_slurm("scancel", "--batch", "--signal=USR1", job.ident)
        end = clock.monotonic() + folder.spec().grace_s + ANSWER_S
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
            clock.sleep(_POLL_S)
        if state.status != "COMPLETED":
            return f"job {job.ident} ended: {state.status}, {state.reason}"
        return f"job {job.ident} stopped after saving"

    def resize(self, job: Job, folder: JobFolder, nodes: NodeRange) -> str:
        """Stop the job after saving, and submit it for another number of nodes."""
        spec = folder.spec().resized(nodes)
        check_shell(spec)
        check_queue(spec)
        rendered = render(spec)
        checked_by_slurm(rendered)  # before anything is stopped
        done = self.cancel(job, folder, now=False)
        ident = submit(spec, folder, rendered)
        return f"{done}; submitted job {ident} for {nodes} nodes"


ENGINE = _Slurm()
