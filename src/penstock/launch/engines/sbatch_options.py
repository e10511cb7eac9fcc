"""Options of sbatch that a run cannot have, in each spelling that sbatch knows; pure.

sbatch takes an option as `--name=value`, `--name value`, `--nam value`, `-n value`, `-nvalue` and
`-Hn value`, quoted or not, and as a variable `SBATCH_NAME`, which overrides the lines of the script.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.core.errors import UsageError
from penstock.launch.spec import RunSpec, check_no_secret_in

_SET = "The script sets --{} itself"
_SET_FIX = "Other options of Penstock set it: penstock launch slurm --help."
_MULTIPLIES = (
    "--{} would start the run several times: it is one job, with one process on each node that starts the "
    "others"
)
_MULTIPLIES_FIX = "Leave it out; --nodes and --processes say how many processes there are."
_SUBMITS = "With --{} sbatch does not submit the job and print its number at once"
_HIDES = "With --{} messages of the job are not in the file that `penstock launch logs` reads"
_ELSEWHERE = "With --{} the job is on another cluster than the one queried for its state"
_REPLACES = "--{} replaces this shell's variables, among them the run's secrets"
_DROPS = "--{} without ALL drops this shell's variables, among them the run's secrets"
_LEAVE = "Leave it out."


@dataclass(frozen=True, slots=True)
class _Refused:
    letter: str = ""
    why: str = _SET
    fix: str = _SET_FIX
    variable: str = ""
    """Variable of the same meaning."""


REFUSED = {
    "nodes": _Refused("N"),
    "ntasks": _Refused("n"),
    "requeue": _Refused(variable="SBATCH_REQUEUE"),
    "no-requeue": _Refused(variable="SBATCH_NO_REQUEUE"),
    "open-mode": _Refused(variable="SBATCH_OPEN_MODE"),
    "output": _Refused("o", variable="SBATCH_OUTPUT"),
    "signal": _Refused(variable="SBATCH_SIGNAL"),
    "job-name": _Refused("J", variable="SBATCH_JOB_NAME"),
    "time": _Refused("t", variable="SBATCH_TIMELIMIT"),
    "partition": _Refused("p", variable="SBATCH_PARTITION"),
    "account": _Refused("A", variable="SBATCH_ACCOUNT"),
    "array": _Refused("a", _MULTIPLIES, _MULTIPLIES_FIX, "SBATCH_ARRAY_INX"),
    **{
        name: _Refused("", _MULTIPLIES, _MULTIPLIES_FIX)
        for name in (
            *("ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket"),
            *("ntasks-per-tres", "tasks-per-node"),
        )
    },
    "test-only": _Refused("", _SUBMITS, "--dry-run asks sbatch --test-only."),
    "parsable": _Refused("", "The submission has --{} itself", _LEAVE),
    "wait": _Refused("W", _SUBMITS, "`penstock launch logs -f` follows the job.", "SBATCH_WAIT"),
    "quiet": _Refused("Q", _SUBMITS, _LEAVE),
    "help": _Refused("h", _SUBMITS, _LEAVE),
    "usage": _Refused("", _SUBMITS, _LEAVE),
    "version": _Refused("V", _SUBMITS, _LEAVE),
    "wrap": _Refused("", "--{} is a script of its own, in place of the run's", _LEAVE),
    "chdir": _Refused(
        "D",
        "The script changes to its working folder, whatever --{} says",
        "Launch the run from that folder.",
    ),
    "error": _Refused("e", _HIDES, _LEAVE, "SBATCH_ERROR"),
    "clusters": _Refused("M", _ELSEWHERE, "Name the cluster by SLURM_CONF.", "SBATCH_CLUSTERS"),
    "uid": _Refused("", "--{} runs the job as another user, who cannot read the run's folder", _LEAVE),
    "gid": _Refused("", "--{} runs the job as another group, which may not read the run's folder", _LEAVE),
    "get-user-env": _Refused("", _REPLACES, _LEAVE, "SBATCH_GET_USER_ENV"),
    "export-file": _Refused("", _REPLACES, "Use --env and --secret."),
    "export": _Refused("", _DROPS, "Write --export=ALL,NAME=VALUE, or use --env.", "SBATCH_EXPORT"),
}
"""Options by name. Given twice, Slurm would take the last; a variable overrides the script."""
_FLAGS = "HOQhsvVW"
"""Letters of sbatch that take no value, so that others may follow."""
_OTHER_VARIABLES = {"SLURM_CLUSTERS": "clusters"}


def check_extra(text: str) -> str:
    """Return an option that is handed through.

    Raises:
        UsageError: it is none, has a secret, or is one that a run cannot have.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not text.startswith("-") or not text.isprintable() or not words:
        raise UsageError("--sbatch takes an option of sbatch", got=text, fix="Example: --sbatch=--qos=long.")
    check_no_secret_in([text], where="--sbatch")
    for word, after in zip(words, [*words[1:], ""], strict=True):
        for name in _named_by(word):
            _, equals, value = word.partition("=")
            if name != "export" or not _keeps_all(value if equals else after):
                raise UsageError(REFUSED[name].why.format(name), got=text, fix=REFUSED[name].fix)
    return text


def check_variables(variables: Mapping[str, str], spec: RunSpec) -> None:
    """Refuse variables of the shell that would change the script of a run.

    Raises:
        UsageError: with the variable.
    """
    taken = {"partition": spec.queue, "account": spec.account, "time": spec.time_limit_s}
    named = {refused.variable: name for name, refused in REFUSED.items() if refused.variable}
    for variable, name in (named | _OTHER_VARIABLES).items():
        value = variables.get(variable)
        if value is None or (name == "export" and _keeps_all(value)) or not taken.get(name, True):
            continue
        raise UsageError(
            f"{variable} is set, which is --{name} of sbatch. {REFUSED[name].why.format(name)}",
            got=f"{variable}={value}",
            fix=f"Unset it: env -u {variable} penstock launch ...",
        )


def _keeps_all(exported: str) -> bool:
    return exported.split(",")[0].upper() == "ALL"


def _named_by(word: str) -> Iterator[str]:
    """Yield the refused options that a word sets.

    >>> [list(_named_by(word)) for word in ("--part=x", "-HN8", "-vWN", "--wait-all-nodes=1", "8")]
    [['partition'], ['nodes'], ['wait', 'nodes'], [], []]
    """
    if word.startswith("--"):
        name = word[2:].partition("=")[0]
        exact = [name] if name in REFUSED else []
        yield from exact or [option for option in REFUSED if name and option.startswith(name)][:1]
    elif match := re.fullmatch(rf"-([{_FLAGS}]*)(.?).*", word):
        letters = {refused.letter: name for name, refused in REFUSED.items() if refused.letter}
        yield from (letters[letter] for letter in match[1] + match[2] if letter in letters)
