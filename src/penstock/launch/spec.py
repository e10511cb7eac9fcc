"""Specification of a launched run: what every engine renders, one frozen value; no torch.

    RunSpec -> render/<engine>.py (pure: files, commands, settings, reasons) -> engines/<engine>.py (apply)

An engine is what starts processes on machines: this machine's kernel, Slurm, or Kubernetes. Nothing in a
specification is particular to one, except the extras that are handed through, Slurm's setup and wrapper, and
the pods.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from penstock.core import config as configs
from penstock.core import env
from penstock.core.config import Raw
from penstock.core.errors import UsageError
from penstock.core.limits import Limit, check_limits, limited
from penstock.core.toml import flat
from penstock.launch.pod_networks import check_addresses
from penstock.launch.pods.pod import PodSpec

MARGIN_S = 5.0
"""Seconds of a grace period that are kept free: signals and exits take their time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRange:
    """Number of nodes of a run: fixed, or from a least to a most."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UsageError(
                "--nodes takes a number of at least 1, or MIN:MAX with MIN at most MAX",
                got=f"{self.least}:{self.most}" if self.least != self.most else str(self.least),
                fix="Example: --nodes 4, or --nodes 2:4.",
            )

    @property
    def is_elastic(self) -> bool:
        """True if the number may change while the run goes on."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.is_elastic else str(self.least)


def node_range(text: str) -> NodeRange:
    """Read `4` or `2:4`.

    Raises:
        UsageError: it is neither.

    >>> node_range("2:4"), str(node_range("3"))
    (NodeRange(least=2, most=4), '3')
    """
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text.strip())
    if not match:
        raise UsageError(
            "--nodes takes a number, or MIN:MAX", got=text, fix="Example: --nodes 4, or --nodes 2:4."
        )
    return NodeRange(least=int(match[1]), most=int(match[2] or match[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Environment variable of the run whose value is elsewhere, so that no file of the run holds it."""

    name: str
    source: str
    """`env:NAME`: a variable of the submitting shell, handed on by the engine. `file:PATH`: a file, read on
    each node at each start. `key:NAME/KEY`: a key of a Secret of Kubernetes, which sets the variable."""


GRACE = Limit(
    least=1e-3,
    most=65_535,  # of Slurm's --signal
    says="a number of seconds above 0, at most 65,535",
    fix="Give the seconds of the longest step and of a save, and a margin.",
)
_TIME_LIMIT = Limit(least=0, most=10 * 365 * 86_400, says="a time of at most ten years")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run to be launched: what runs, on what, and how it is stopped and restarted."""

    name: str
    """Name of the job, shown by the engine."""
    command: tuple[str, ...]
    """Words after `penstock`: the training command of each process."""
    run_dir: str
    """Absolute path of the run's folder; on a file system that all nodes share."""
    work_dir: str
    """Folder in which the command is started: relative paths of the recipe begin there."""
    python: str
    """Interpreter of the environment in which Penstock is installed, the same path on all nodes."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of every process, besides those that the engine hands on."""
    secrets: tuple[Secret, ...] = ()
    nodes: NodeRange
    processes: int = limited(Limit(least=1, most=10_000), 1)
    """Processes of each node, one per device."""
    networks: tuple[str, ...] = ()
    """Interface that carries the run's traffic, on every node. Empty: those that each node finds."""
    storage: tuple[str, ...] = ()
    """Folders that every node must see: the run's, those of the corpora."""
    grace_s: float = limited(GRACE, 60.0)
    """Time from a request to stop until processes are killed: a step and a save must fit."""
    time_limit_s: float = limited(_TIME_LIMIT, 0.0)
    """Longest time of one start, such as 90m or 24h; 0: the queue's."""
    queue: str = ""
    """Queue of the engine: Slurm's partition, or Kueue's LocalQueue. Empty: the engine's own."""
    account: str = ""
    """Account in Slurm. Empty: yours."""
    extras: tuple[str, ...] = ()
    """Options of the engine that Penstock does not know, handed through."""
    setup: str = ""
    """Text of a shell script that a job on Slurm reads first, such as `module load gcc`."""
    wrapper: tuple[str, ...] = ()
    """Words before the command of each node on Slurm, such as those of `apptainer exec IMAGE`."""
    idle_starts: int = limited(Limit(least=1, most=1_000_000), 3)
    """Starts in a row without a new checkpoint after which the run ends with exit code 76."""
    max_requeues: int = limited(Limit(least=0, most=1_000_000), 100)
    """Times that the job may be requeued; on Kubernetes, that all pods start again at the time limit."""
    ttl_s: float = limited(_TIME_LIMIT, 0.0)
    """Time from the end of a JobSet until the cluster deletes it, such as 7d; 0: it stays."""
    pod: PodSpec | None = None
    """Pods of its nodes, on Kubernetes."""
    doctor: Literal["report", "require", "skip"] = "skip"
    """Examine a fixed number of nodes together before the first start; require: end at a red line."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.pod is not None:
            check_addresses(self.pod.networks, num_pods=self.nodes.most, provider=self.pod.network_provider)
            if self.ttl_s and self.pod.api == "trainjob":
                raise UsageError(
                    "A TrainJob stays until somebody deletes it: --ttl is for a JobSet",
                    got=f"--ttl {self.ttl_s:g}",
                    fix="Leave out --ttl, or --api trainjob.",
                )
        if self.time_limit_s and self.time_limit_s <= self.grace_s:
            raise UsageError(
                f"The time limit is not longer than the grace of {self.grace_s:g} s, so the run would be "
                "stopped before it starts",
                got=f"{self.time_limit_s:g} s",
                fix="Raise --time-limit, or lower --grace.",
            )

        if self.pod is None and (keys := [each for each in self.secrets if each.source.startswith("key:")]):
            raise UsageError(
                "Only Kubernetes knows a Secret and its key",
                got=f"--secret {keys[0].name}={keys[0].source}",
                fix="Write NAME=file:PATH, or NAME=env:NAME for a variable of this shell.",
            )

    @property
    def save_within_s(self) -> float:
        """Seconds from a request to stop within which a checkpoint must be complete."""
        return max(self.grace_s - MARGIN_S, 0.5 * self.grace_s)

    @property
    def node_python(self) -> tuple[str, ...]:
        """Words that start Python on a node; in a wrapper, such as a container, the `python3` of its PATH."""
        return (*self.wrapper, "python3") if self.wrapper else (self.python,)

    @property
    def most_ranks(self) -> int:
        """Number of processes on the largest number of nodes."""
        return self.nodes.most * self.processes

    def resized(self, nodes: NodeRange) -> "RunSpec":
        """Return the same run on another number of nodes."""
        return replace(self, nodes=nodes)

    def as_json(self) -> Raw:
        """Return plain values that `read` reads back."""
        return configs.dump(self)

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:  # Any: what JSON holds
        """Build a specification from the values of its file."""
        return configs.build(cls, raw)


def needed_grace(*, step_s: float, save_s: float) -> tuple[float, str]:
    """Return the seconds in which a run stops after saving, and of what they are made, as text.

    >>> needed_grace(step_s=2.0, save_s=0.0)
    (7.0, "a step of 2.0 s (measured in this run's folder) and a margin of 5 s")
    """
    parts = [f"a {name} of {s:.1f} s" for name, s in (("step", step_s), ("save", save_s)) if s]
    measured = f"{', '.join(parts)} (measured in this run's folder) and " if parts else ""
    return step_s + save_s + MARGIN_S, f"{measured}a margin of {MARGIN_S:g} s"


def check_grace(grace_s: float, *, step_s: float, save_s: float) -> None:
    """Refuse a grace in which the last step, its save and a margin do not fit.

    Args:
        step_s: longest measured step.
        save_s: longest measured save.

    Raises:
        UsageError: the message has the grace that would do.
    """
    needed, parts = needed_grace(step_s=step_s, save_s=save_s)
    if grace_s < needed:
        raise UsageError(
            f"The grace is too short for {parts}",
            got=f"{grace_s:g} s",
            fix=f"Give --grace {int(needed) + 1} or more.",
        )


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_KEYS = (
    "access|account|admin|api|auth|client|deploy|encryption|gpg|hmac|host|jwt|license|master|pgp|private|rsa"
    "|secret|service|session|shared|signing|ssh|storage|subscription|tls|webhook"
)
"""What a key is for, if it is a secret: no sort_key, no text_key."""
_SECRET_NAME = re.compile(
    r"(?:^| )(?:token|secrets?|pass|passcode|credentials?)$|(?:passphrase|passwords?|passwd)$|[^ ] pwd$"
    r"|(?:^| )(?:admin|db|ftp|git|imap|ldap|mail|mysql|pg|proxy|redis|root|smtp|sql|ssh|user)pass$"
    rf"|(?:^| )(?:{_KEYS}) ?keys?$"
)
"""The end of a name in lower case, with spaces between words: DB_PASS, dbPass and DB_PASS_2 are `db pass`."""
_COUNTS = {"count", "first", "last", "least", "limit", "max", "min", "most", "n", "num", "per", "total"}
_SPECIAL = {"bos", "cls", "eos", "mask", "pad", "sep", "special", "stop", "unk"}


def _is_secret_name(name: str, value: str) -> bool:
    """Return True if a variable or key of this name holds a secret, rather than a number of tokens or passes.

    >>> [_is_secret_name(*pair) for pair in (("PGPASS", "x1"), ("NUM_PASS", "3"), ("eos_token", "</s>"))]
    [True, False, False]
    """
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if not _SECRET_NAME.search(" ".join(words)):
        return False
    if re.fullmatch(r"[0-9]{1,3}|true|false|yes|no|none|on|off", value, re.IGNORECASE):
        return False
    is_number = re.fullmatch(r"[0-9._]{1,15}", value) is not None
    is_mark = re.fullmatch(r"[<\[][^<>\[\]]{1,40}[>\]]", value) is not None
    return not (is_number and _COUNTS.intersection(words)) and not (is_mark and _SPECIAL.intersection(words))


_SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|npm_[A-Za-z0-9]{30,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|sk-[\w-]{20,}|[rs]k_live_\w{16,}"
    r"|nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,}|xai-[A-Za-z0-9]{20,}|pplx-[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{20,}"
    r"|lsv2_[a-z]{2}_\w{20,}|tgp_v1_[\w-]{20,}|dop_v1_\w{20,}|dapi[0-9a-f]{32}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|pypi-AgE[\w-]{16,}|dckr_pat_[\w-]{16,}|hvs\.[\w-]{20,}|AccountKey=[^;\s]{16,}"
    r"|gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat)-[\w-]{16,}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.eyJ)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^/\s:@]*:[^/\s@]+@"  # a password in an address
    rf"|(?i:[?&;](?:[a-z_-]*(?:token|secret|password|signature|credential|(?:{_KEYS})[_-]?key)"
    r"|auth|key|pass|passwd|pwd|sig)=[^&\s])"  # a query
)
"""Forms that issuers give their keys: Hugging Face, npm, GitHub, AWS, Google, OpenAI, GitLab (glpat-, gldt-),
NVIDIA, Groq, xAI, Perplexity, Replicate, LangSmith, Together, DigitalOcean, Databricks, SendGrid, Slack,
PyPI, Docker, Stripe, Vault, Azure; JSON web tokens, private keys, and addresses with a password, a key, a
token or a signature."""


def check_no_secret(values: Mapping[str, Any], *, where: str) -> None:  # Any: TOML values
    """Refuse plain values with a secret among them: they are written to files and shown.

    Raises:
        UsageError: the message names the key, and not the value.
    """
    for key, value in flat(values):
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        for text in texts:
            if isinstance(text, str) and text and (_is_secret_name(key, text) or _SECRET_VALUE.search(text)):
                raise UsageError(
                    f"{where} holds what looks like a secret, and is copied into the run's folder",
                    got=f"{key} = {text[:3]}...",
                    fix="Take it out, and hand the value over by reference: --secret NAME=file:PATH, or "
                    "--secret NAME=env:NAME.",
                )


def check_no_secret_in(options: Sequence[str], *, where: str) -> None:
    """Refuse options of other programs with a secret among them, as a value or as one of their variables.

    Raises:
        UsageError: the message names the variable, and not the value.
    """
    for option in options:
        check_no_secret({where: option, **dict(_PAIR.findall(option))}, where=where)


_PAIR = re.compile(r"([\w.-]+)=(?=([^\s,]*))")
"""NAME=VALUE, also inside another's value: --export=ALL,NAME=VALUE."""


def environment_of(settings: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Read `NAME=VALUE` settings, and add the format of this command's log, which the run's processes follow.

    Raises:
        UsageError: one is none, or its value is a secret.
    """
    found = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not _NAME.fullmatch(name) or "\n" in value:
            raise UsageError("--env takes NAME=VALUE", got=setting, fix="Example: --env OMP_NUM_THREADS=4.")
        check_no_secret({name: value}, where="--env")
        found.append((name, value))
    if env.log_format() != "text" and env.LOG_FORMAT not in dict(found):
        found.append((env.LOG_FORMAT, env.log_format()))
    return tuple(found)


def secrets_of(settings: Sequence[str]) -> tuple[Secret, ...]:
    """Read `NAME=file:PATH`, `NAME=env:NAME` and `NAME=key:SECRET/KEY` settings.

    Raises:
        UsageError: one is none; its value is not shown, as it may be the secret.
    """
    found = []
    for setting in settings:
        name, _, source = setting.partition("=")
        kind, _, where = source.partition(":")
        if not _NAME.fullmatch(name) or kind not in ("env", "file", "key") or not where:
            raise UsageError(
                "--secret takes a reference, not a value",
                got=f"{name[:40]}=...",
                fix="Write NAME=file:PATH, NAME=env:NAME for a variable of this shell, or "
                "NAME=key:SECRET/KEY for a Secret of Kubernetes.",
            )
        if not _WHERE[kind].fullmatch(where):
            raise UsageError(
                "--secret names a variable, a file by its absolute path, or a Secret and its key",
                got=f"{name}={kind}:...",
                fix="Examples: NAME=env:WANDB_API_KEY, NAME=file:/run/key, NAME=key:wandb/api-key.",
            )
        found.append(Secret(name=name, source=source))
    return tuple(found)


def checked_setup(text: str) -> str:
    """Return the text of a setup file.

    Raises:
        UsageError: it gives a variable a secret as a plain value.
    """
    for line in text.splitlines():
        given = {
            name: value
            for name, value in _PAIR.findall(line)
            if value.strip("\"';")[:1] not in ("", "$", "`")
        }
        check_no_secret({"--setup": line, **given}, where="The setup file")
    return text


def words_of_wrapper(text: str) -> tuple[str, ...]:
    """Read the words of `--wrapper`, as a shell does.

    Raises:
        UsageError: there are none, a quote is open, one is a secret, or only a shell could run them.

    >>> words_of_wrapper("apptainer exec --nv '/images/my image.sif'")
    ('apptainer', 'exec', '--nv', '/images/my image.sif')
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        words = ()
    if not words or not text.isprintable():
        raise UsageError(
            "--wrapper takes a command that starts the one behind it",
            got=text,
            fix="Example: --wrapper 'apptainer exec --nv /images/penstock.sif'. Close its quotes.",
        )
    check_no_secret_in(words, where="--wrapper")
    is_program = not re.match(r"-|[A-Za-z_]\w*\+?=", words[0]) and words[0] not in _OF_SHELL
    if not is_program or any(word in _OPERATORS or word.endswith(";") for word in words):
        raise UsageError(
            "--wrapper takes a program and its arguments, which no shell reads",
            got=text,
            fix="Put variables and `source` into --setup. Example: --wrapper 'numactl --localalloc'.",
        )
    return words


_OF_SHELL = (".", "source", "export", "module", "cd", "exec", "eval")
_OPERATORS = ("&&", "||", ";", "|", "&")


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHERE = {
    "env": _NAME,
    "file": re.compile(r"/.*"),
    "key": re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._a-zA-Z0-9]+"),
}
