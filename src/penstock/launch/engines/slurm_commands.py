"""Slurm's commands, each with a time to answer; errors say whether Slurm refused, is away, or was silent."""

import shutil
import subprocess
from collections.abc import Sequence

from penstock.core.errors import PenstockError
from penstock.launch.engines.engine import EngineUnreachable

ANSWER_S = 60.0
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


class SlurmUnreachable(EngineUnreachable):
    """Slurm's controller does not answer, or is not known here."""


class SlurmSilent(SlurmUnreachable):
    """Slurm's controller was asked for something and did not answer in time: it may do it nevertheless."""


def find_command(command: str) -> None:
    """Refuse a machine without a command of Slurm.

    Raises:
        PenstockError: it is not there.
    """
    if shutil.which(command) is None:
        raise PenstockError(
            f"There is no {command} on this machine",
            fix="Type the command where Slurm's commands are, on a login node; --dry-run works without.",
        )


def run_slurm(*words: str, is_tried: bool = False) -> str:
    """Run a command of Slurm; return what it prints.

    Args:
        is_tried: return "" if it fails.
    """
    find_command(words[0])
    done = _answered(words)
    if done.returncode and not is_tried:
        raise _refused(words[0], _last_line(done.stderr or done.stdout))
    return "" if done.returncode else done.stdout


def query_job(*words: str) -> str:
    """Run a query about a job; return what it prints, "" if Slurm no longer knows the job.

    Raises:
        PenstockError: anything else went wrong, so the job may run.
    """
    find_command(words[0])
    done = _answered(words)
    said = _last_line(done.stderr or done.stdout)
    if done.returncode and _FORGOTTEN not in said:
        raise _refused(words[0], said)
    return "" if done.returncode else done.stdout


def job_id(answer: str) -> str:
    """Return the number of a job from what `sbatch --parsable` prints: NUMBER, or NUMBER;CLUSTER.

    Raises:
        PenstockError: there is none, so no job is known to be submitted.

    >>> job_id("1234;cluster")
    '1234'
    """
    lines = answer.split()
    ident = lines[-1].partition(";")[0] if lines else ""
    if not (ident.isascii() and ident.isdigit()):
        raise PenstockError(
            "sbatch printed no number of a job",
            got=answer.strip()[:200] or "nothing",
            fix="Look for the job: squeue --me. The sbatch in PATH must heed --parsable.",
        )
    return ident


def try_script(script: str) -> str:
    """Return what `sbatch --test-only` says of a batch script.

    Raises:
        PenstockError: Slurm would refuse it.
    """
    done = _answered(["sbatch", "--test-only"], script=script)
    if done.returncode:
        raise _refused("sbatch --test-only", _last_line(done.stderr or done.stdout))
    return _last_line(done.stderr or done.stdout)


def _answered(words: Sequence[str], *, script: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, input=script, capture_output=True, text=True, check=False, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired:
        raise SlurmSilent(
            f"Slurm did not answer {words[0]} within {ANSWER_S:g} s", fix="Ask `scontrol ping`."
        ) from None


def _refused(command: str, said: str) -> PenstockError:
    if any(words in said for words in _UNREACHABLE):
        error = SlurmSilent if _TIMED_OUT in said else SlurmUnreachable
        return error(
            f"{command} cannot reach Slurm: {said.partition('fatal: ')[2] or said}",
            fix="Type it on a login node, or name the cluster by SLURM_CONF; `scontrol ping` asks it.",
        )
    said = said.removeprefix("sbatch: ").removeprefix("error: ").removeprefix("allocation failure: ")
    fix = "Correct what it names; it did nothing."
    return PenstockError(
        f"{command} refused: {said}",
        fix=fix if command.startswith("sbatch") else "Ask `scontrol ping`, and try again.",
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
