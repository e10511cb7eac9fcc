"""Environment: the only module that reads environment variables and the machine's size."""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Rank of this process and world size, as set by torchrun or `penstock train --processes`."""

    rank: int
    """Global rank of this process, in [0, world_size)."""
    world_size: int
    """Number of processes of the run."""
    local_rank: int
    """Index of this process on its machine; selects the device."""


def ranks() -> Ranks:
    """Read RANK, WORLD_SIZE and LOCAL_RANK; a single process if they are not set.

    Raises:
        UsageError: one is no whole number, or RANK is not below WORLD_SIZE.
    """
    rank, world_size = whole("RANK", 0), whole("WORLD_SIZE", 1, least=1)
    if rank >= world_size:
        raise UsageError(
            f"The environment variable RANK must be below WORLD_SIZE, which is {world_size}",
            got=rank,
            fix="Start the processes with torchrun or --processes, which set both, or unset both.",
        )
    return Ranks(rank=rank, world_size=world_size, local_rank=whole("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Return the number of processes of the run on this machine.

    Raises:
        UsageError: LOCAL_WORLD_SIZE or WORLD_SIZE is no whole number above 0.
    """
    return whole("LOCAL_WORLD_SIZE", 0, least=1) or whole("WORLD_SIZE", 1, least=1)


RENDEZVOUS = "PENSTOCK_RENDEZVOUS"
"""Variable with the file URL of the rendezvous of processes started by Penstock's launcher."""


RENDEZVOUS_KEY = "PENSTOCK_RENDEZVOUS_KEY"
"""Variable with the key of the rendezvous of a run on several machines."""


def take_rendezvous_key() -> str:
    """Return the key of the rendezvous, and remove its variable: no rank or log has it. Empty: none."""
    return os.environ.pop(RENDEZVOUS_KEY, "")


JOB = "PENSTOCK_JOB"
"""Variable with the id of the Kubernetes Job that made a pod."""


NODES = "PENSTOCK_NODES"
"""Variable with the numbers of nodes with which a launched run may go on, MIN:MAX; empty: one number only."""


def has_launcher() -> bool:
    """Return True if Penstock's own launcher started this process and can restart others."""
    return RENDEZVOUS in os.environ


def rendezvous() -> str:
    """Return the rendezvous URL of the run: a file, or MASTER_ADDR and MASTER_PORT as set by torchrun."""
    return os.environ.get(RENDEZVOUS, "env://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """TCP address of the rendezvous store."""

    address: str
    port: int
    is_kept: bool
    """True if the launcher hosts the store (torchrun's agent), so no rank has to."""


def meeting() -> Meeting | None:
    """Read MASTER_ADDR and MASTER_PORT; None if they are not set.

    Raises:
        UsageError: MASTER_PORT is no TCP port.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), whole("MASTER_PORT", 0, least=1, most=65_535)
    if not address or not port:
        return None
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Meeting(address=address, port=port, is_kept=kept)


def variables(*prefixes: str) -> dict[str, str]:
    """Return the environment variables whose names start with a prefix, sorted."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


LOG_FORMAT = "PENSTOCK_LOG_FORMAT"
"""Variable with the format of the log, of `--log-format`; processes inherit it."""


def log_format() -> str:
    """Return the format of the log: text, logfmt or json."""
    return os.environ.get(LOG_FORMAT, "") or "text"


def set_log_format(name: str) -> None:
    """Set the format of the log, also of processes that this one starts."""
    os.environ[LOG_FORMAT] = name


def silence_torch() -> None:
    """Stop torch's C++ code from logging errors that it also raises; call before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def sleep_at_barriers() -> None:
    """Make waiting OpenMP threads sleep soon; call before torch is imported.

    GNU's library spins for milliseconds. If the cores are shared, a spinning thread keeps a core from the
    thread it waits for, at every barrier. Variables set by the user are kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(
            "GOMP_SPINCOUNT", "2000"
        )  # some 40 us: longer than the pause between two matrix products


def num_gloo_interfaces() -> int:
    """Return the number of network interfaces that gloo alternates over: those in GLOO_SOCKET_IFNAME."""
    return max(1, len([name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]))


_MAX_THREADS = 2**16
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_cores() -> int:
    """Return the CPU cores this process may use, by its affinity mask and its control groups' limits."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [_cpu_limit(group) for group in _own_groups("cpu")]
    return max(1, int(min([cores, *limits])))


def memory_bytes() -> int:
    """Return the memory of this machine, or the lowest limit of this process's control groups."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_number(group, *_MEMORY_MAX) for group in _own_groups("memory")]
    return min([installed, *(limit for limit in limits if limit is not None)])


def available_bytes() -> int:
    """Return the memory a process can allocate now without swapping, within its control groups' limits."""
    available = _meminfo("MemAvailable")
    if available is None:
        available = memory_bytes() // 2  # where the system gives no figure
    for group in _own_groups("memory"):
        limit, used = _number(group, *_MEMORY_MAX), _number(group, *_MEMORY_USED)
        if limit is not None and used is not None:
            available = min(available, limit - used)
    return available


_MEMORY_MAX = ("memory.max", "memory.limit_in_bytes")
_MEMORY_USED = ("memory.current", "memory.usage_in_bytes")
"""Files of a control group, of version 2 and of version 1."""


def _own_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it (Linux, versions 1 and 2)."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controller if controllers else _GROUPS
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _cpu_limit(group: Path) -> float:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):  # of version 1, or without a limit
        quota_us, period_us = (_number(group, f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        return quota_us / period_us if quota_us and period_us else math.inf


def _number(group: Path, *names: str) -> int | None:
    """Return the number in the first of these files of a control group; None: there is no limit."""
    for name in names:
        with suppress(OSError):
            text = (group / name).read_text().strip()
            return int(text) if text.isdecimal() else None
    return None


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, StopIteration):
        return None


def num_threads(processes: int | None = None) -> int:
    """Return the threads this rank computes with: OMP_NUM_THREADS, else its share of the machine's cores.

    Args:
        processes: ranks on this machine; None: as set by the launcher.

    Raises:
        UsageError: OMP_NUM_THREADS is no number of threads. A list, a number for each level of nesting, is
            left to OpenMP.
    """
    shared = local_world_size() if processes is None else processes
    is_list = "," in variable("OMP_NUM_THREADS")
    threads = 0 if is_list else whole("OMP_NUM_THREADS", 0, most=_MAX_THREADS)
    return threads or max(1, num_cores() // shared)


def cache_folder() -> Path:
    """Return the folder for cached remote data: PENSTOCK_CACHE, or `penstock` in the user's cache folder."""
    if named := os.environ.get("PENSTOCK_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "penstock"
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "penstock"


def native_baseline() -> str:
    """Return the baseline of CPUs that compiled code is for (PENSTOCK_NATIVE_BASELINE); empty: this CPU.

    For tests of other CPUs, such as `x86-64-v3` on one that has AVX-512.
    """
    return os.environ.get("PENSTOCK_NATIVE_BASELINE", "")


def waits_for_operators() -> bool:
    """Return True if the first use of the C++ operators waits for their build (PENSTOCK_NATIVE=wait)."""
    return os.environ.get("PENSTOCK_NATIVE", "") == "wait"


def library_folder() -> Path:
    """Return the folder of shipped libraries: PENSTOCK_LIBRARIES, or `lib/penstock` of this Python."""
    return Path(os.environ.get("PENSTOCK_LIBRARIES") or f"{sys.prefix}/lib/penstock")


def compiler(variable: str) -> str | None:
    """Return the compiler named by a variable (CXX for C++, CC for C); None if it is not set."""
    return os.environ.get(variable) or None


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's instruction-set flags; empty if the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def set_compiled_programs(folder: Path, *, given: bool) -> None:
    """Set the folder of torch's compiled programs (TORCHINDUCTOR_CACHE_DIR).

    Args:
        given: True if the user named the folder; it then overrides the environment.
    """
    if given:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    else:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def allow_plain_http() -> bool:
    """Return True if unencrypted http to other machines is allowed (PENSTOCK_ALLOW_HTTP=1)."""
    return os.environ.get("PENSTOCK_ALLOW_HTTP") == "1"


def allow_plain_http_endpoint() -> bool:
    """Return True if an object store's endpoint may be plain http: as above, or AWS_ALLOW_HTTP=true."""
    return allow_plain_http() or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")


def api_key() -> str | None:
    """Return the API key of `penstock serve` (PENSTOCK_API_KEY); None if it is not set."""
    return os.environ.get("PENSTOCK_API_KEY") or None


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files and connections to the system's maximum, at most 65,536."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def process_is_alive(pid: int) -> bool:
    """Return True if a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user, so it exists
        pass
    return True


def boot_id() -> str | None:
    """Return the id of the machine's present boot; None if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusServer:
    """Where and how a pod reports the progress of its Kubeflow TrainJob (Trainer 2.2 or later)."""

    url: str
    """HTTPS address that takes a POST."""
    ca_file: Path
    """Certificate authority of the address."""
    token_file: Path
    """File of the bearer token; its content changes while the pod runs."""


def status_server() -> StatusServer | None:
    """Read KUBEFLOW_TRAINER_SERVER_URL, _CA_CERT and _TOKEN; None unless all are set."""
    names = ("URL", "CA_CERT", "TOKEN")
    url, ca_file, token_file = (os.environ.get(f"KUBEFLOW_TRAINER_SERVER_{name}", "") for name in names)
    if not (url and ca_file and token_file):
        return None
    return StatusServer(url=url, ca_file=Path(ca_file), token_file=Path(token_file))


def prepare_hub(*, offline: bool) -> None:
    """Set what Hugging Face's libraries and lm-eval read from the environment when they are imported.

    Args:
        offline: True: their hub is not reached.
    """
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = str(int(offline))
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval would fork for each standard error


def set_variables(values: Mapping[str, str]) -> None:
    """Set environment variables of this process and of those that it starts."""
    os.environ.update(values)


def has_variable(name: str) -> bool:
    """Return True if an environment variable is set, also to nothing."""
    return name in os.environ


def variable(name: str) -> str:
    """Return an environment variable; empty if it is not set."""
    return os.environ.get(name, "")


def whole(name: str, default: int, *, least: int = 0, most: int = 2**31 - 1) -> int:
    """Return the whole number in an environment variable, or the default if it is empty or not set.

    Raises:
        UsageError: it is no whole number from `least` to `most`.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise UsageError(
            f"The environment variable {name} must be a whole number from {least} to {most:,}",
            got=text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...",
            fix="Correct it, or unset it.",
        )
    return int(text)


_MAX_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTask:
    """This process as a task that `srun` started, one on each node."""

    node: int
    """Index of the node in the step; nodes are in the order of Slurm's topology."""
    num_nodes: int
    host: str
    """Slurm's name of the node."""
    address: str
    """Address of the machine that runs `srun`: the first node."""


def slurm_task() -> SlurmTask | None:
    """Read the variables of `srun`; None outside of a step.

    Raises:
        UsageError: SLURM_NODEID or a number of nodes is no whole number.
    """
    if "SLURM_STEP_ID" not in os.environ or not os.environ.get("SLURM_NODEID"):
        return None
    return SlurmTask(
        node=whole("SLURM_NODEID", 0),
        num_nodes=whole("SLURM_STEP_NUM_NODES", 0, least=1) or whole("SLURM_NNODES", 1, least=1),
        host=os.environ.get("SLURMD_NODENAME", ""),
        address=os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""),
    )
