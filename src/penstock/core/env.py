"""The only place that reads environment variables and the machine's size."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.core.units import parse_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who this process is, as torchrun and `penstock train --processes` say it."""

    rank: int
    """Index of this process among all, in [0, world_size)."""
    world_size: int
    """Number of processes of the run."""
    local_rank: int
    """Index of this process on its machine; selects the device."""


def ranks() -> Ranks:
    """Read RANK, WORLD_SIZE and LOCAL_RANK; one process where they are not set."""
    return Ranks(
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


def local_world_size() -> int:
    """Number of processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


RENDEZVOUS = "PENSTOCK_RENDEZVOUS"
"""File URL through which the processes that Penstock's launcher starts find each other."""


def has_launcher() -> bool:
    """Whether Penstock's own launcher started this process, and could start others."""
    return RENDEZVOUS in os.environ


def rendezvous() -> str:
    """Where the processes of a run meet: a file, or MASTER_ADDR and MASTER_PORT as torchrun sets them."""
    return os.environ.get(RENDEZVOUS, "env://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the processes of a run meet, if not in a file."""

    address: str
    port: int
    is_kept: bool
    """Whether the launcher keeps the store (torchrun's agent), so that no rank has to."""


def meeting() -> Meeting | None:
    """Read MASTER_ADDR and MASTER_PORT; None where they are not set."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        return None
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Meeting(address=address, port=int(port), is_kept=kept)


def variables(*prefixes: str) -> dict[str, str]:
    """Return the environment variables whose names begin so, sorted."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def silence_torch() -> None:
    """Keep torch's C++ code from writing what it raises anyway; must come before it is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def sleep_at_barriers() -> None:
    """Let threads of OpenMP that wait for each other sleep soon; must come before torch is imported.

    GNU's library has them spin for milliseconds. Where others want the cores, one that spins keeps
    a core from the one it waits for, at every barrier. What the user has set is left as it is.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(
            "GOMP_SPINCOUNT", "2000"
        )  # some 40 us: longer than from one product to the next


def num_gloo_interfaces() -> int:
    """Number of network interfaces that gloo's operations take in turn: those in GLOO_SOCKET_IFNAME."""
    return max(1, len([name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]))


_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def num_cores() -> int:
    """Cores this process may use: those of its affinity mask, no more than its container's CPU limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _cpu_limit(_CPU_MAX))))


def _cpu_limit(file: Path) -> float:
    """Return the CPUs that a control group grants (Linux, cgroup v2: microseconds of each period)."""
    try:
        quota, period = file.read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):  # no such system, or another file than expected
        return math.inf


_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Memory of this machine, no more than its container's limit."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _MEMORY_MAX.read_text().strip()
    except OSError:  # no such system
        return installed
    return min(installed, int(limit)) if limit.isdecimal() else installed


_MEMORY_USED = Path("/sys/fs/cgroup/memory.current")


def available_bytes() -> int:
    """Memory that a process could take now without driving others out, within its container's limit."""
    available = _meminfo("MemAvailable")
    if available is None:
        available = memory_bytes() // 2  # a system that does not say
    try:
        return min(available, memory_bytes() - int(_MEMORY_USED.read_text()))
    except (OSError, ValueError):  # no container that says
        return available


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, StopIteration):
        return None


def num_threads(processes: int | None = None) -> int:
    """Threads that this rank computes with: OMP_NUM_THREADS, else its part of the machine's cores.

    Args:
        processes: ranks on this machine; None: as many as the launcher says.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    shared = local_world_size() if processes is None else processes
    return int(asked) if asked.isdecimal() and int(asked) else max(1, num_cores() // shared)


def cache_folder() -> Path:
    """Where copies of remote data may be kept: PENSTOCK_CACHE, or `penstock` in the user's cache folder."""
    if named := os.environ.get("PENSTOCK_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "penstock"
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "penstock"


def compiler() -> str | None:
    """The C++ compiler the user names (CXX)."""
    return os.environ.get("CXX") or None


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The instructions that this machine's CPU has; empty where the system does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def set_compiled_programs(folder: Path, *, given: bool) -> None:
    """Tell torch's compiler where to keep its programs (TORCHINDUCTOR_CACHE_DIR).

    Args:
        given: the user named the folder, so it goes before what the environment says.
    """
    if given:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    else:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def cache_bytes() -> int | None:
    """Bytes that cached remote data may take on disk: PENSTOCK_CACHE_BYTES, such as 64GiB; None if not set.

    Raises:
        UsageError: it is not a size.
    """
    text = os.environ.get("PENSTOCK_CACHE_BYTES")
    return None if text is None else parse_count(text)


def allow_plain_http() -> bool:
    """Whether other machines may be talked to without encryption (PENSTOCK_ALLOW_HTTP=1)."""
    return os.environ.get("PENSTOCK_ALLOW_HTTP") == "1"


def allow_plain_http_endpoint() -> bool:
    """Whether an object store's endpoint may be unencrypted: that, or AWS_ALLOW_HTTP=true as AWS's tools."""
    return allow_plain_http() or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")


def api_key() -> str | None:
    """The key that `penstock serve` asks for (PENSTOCK_API_KEY); None if it is not set."""
    return os.environ.get("PENSTOCK_API_KEY") or None


def raise_descriptor_limit() -> None:
    """Let this process have as many files and connections open as the system allows it, at most 65,536."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def process_is_alive(pid: int) -> bool:
    """Whether a process of that id runs on this machine, as far as this one may see."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's, so it is there
        pass
    return True


def boot_id() -> str | None:
    """What names the time since this machine started; None where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
