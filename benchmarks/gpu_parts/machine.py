"""What the machine is that is measured, and who else is on its GPU.

Run as a script, it imports torch, tries the device with one product and prints what it found as JSON: a
driver that hangs or crashes does so in a process of its own.
"""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_parts.child import run_child
from gpu_parts.environment import environment
from gpu_parts.unfit import Unfit

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "bitsandbytes",
    "pyarrow",
    "torchao",
    "vllm",
    "flashinfer-python",
)
_BUSY_SHARE, _BUSY_BYTES = 0.05, 1 << 30
_ENOUGH_BYTES = 2 << 30
_SMI_TIMEOUT_S = 20
_PROBE_S = 90.0


def probe(device: str) -> dict[str, Any]:
    """Return what `describe` finds, in a process of its own, and `versions`.

    Raises:
        Unfit: the device cannot be computed with.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, __file__, device]
        failed = run_child(command, seconds=_PROBE_S, log=log, environment=environment())
        lines = log.read_text(errors="replace").splitlines()
    if failed:
        raise Unfit(f"The device {device} could not be tried: {failed}. {' '.join(lines[-3:])}")
    found: dict[str, Any] = json.loads(lines[-1])
    if "problem" in found:
        raise Unfit(
            f"Nothing can be computed on {device}: {found['problem'].rstrip('.')}. This takes an NVIDIA "
            "GPU, a driver as new as torch's CUDA, and a torch built for CUDA; --device cpu --size tiny "
            "tries the code alone."
        )
    if found.get("free_bytes", _ENOUGH_BYTES) < _ENOUGH_BYTES:
        raise Unfit(
            f"{found['free_bytes'] / 2**30:.1f} GiB of the GPU's memory are free, too little for any shape. "
            f"{others(usage())} End what uses it, or choose another with CUDA_VISIBLE_DEVICES."
        )
    return found


def is_null_gpu() -> bool:
    """True if this process preloads the null GPU (tools/null_gpu), on which nothing is computed."""
    return hasattr(ctypes.CDLL(None), "null_gpu_totals")


def versions() -> dict[str, str]:
    """Return Python's version and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def usage() -> dict[str, Any]:
    """Return what the GPU does now: `memory_used_mib`, `busy_percent`, `processes`; empty if unknown."""
    rows = _smi("--query-gpu=memory.used,utilization.gpu")
    if not rows:
        return {}
    used, busy = (_number(cell) for cell in rows[0])
    others = _smi("--query-compute-apps=pid,process_name,used_memory")
    return {
        "memory_used_mib": used,
        "busy_percent": busy,
        "processes": [{"pid": row[0], "name": row[1], "memory_mib": _number(row[2])} for row in others],
    }


def others(found: dict[str, Any]) -> str:
    """Return one sentence on who else uses the GPU; empty if nobody does, as far as `usage` can tell.

    >>> others({"memory_used_mib": 40.0, "busy_percent": 0.0, "processes": []})
    ''
    >>> train = {"pid": "7", "name": "train"}
    >>> others({"memory_used_mib": 9216.0, "busy_percent": 80.0, "processes": [train]})
    'The GPU was not idle: 80% busy, 9.0 GiB taken before, by train (7).'
    """
    used, busy = found.get("memory_used_mib") or 0.0, found.get("busy_percent") or 0.0
    names = [f"{process['name']} ({process['pid']})" for process in found.get("processes", [])]
    if used * 2**20 < _BUSY_BYTES and busy < 100 * _BUSY_SHARE and not names:
        return ""
    by = f", by {', '.join(names)}" if names else ""
    return f"The GPU was not idle: {busy:.0f}% busy, {used / 1024:.1f} GiB taken before{by}."


def _smi(query: str) -> list[list[str]]:
    """Return the cells of an answer of nvidia-smi, about the first GPU; none where it is not or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    try:
        said = subprocess.run(
            [program, query, "--format=csv,noheader,nounits", f"--id={gpu}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SMI_TIMEOUT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if line.strip()]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return None


def describe(name: str) -> dict[str, Any]:
    """Return the device's facts; with `problem` if it cannot be computed with."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            import torch
        except Exception as error:  # not there, or a library of the system is not
            return {"problem": f"torch cannot be imported ({error}). Install torch 2.11 or newer."}
        device = torch.device(name)
        found: dict[str, Any] = {"cuda": torch.version.cuda, "host": _host()}
        try:
            found |= _accelerator(torch, device)
            ones = torch.ones(64, 64, device=device)
            found["is_right"] = bool((ones @ ones == 64).all())
        except Exception as error:
            said = " ".join([*(str(warning.message) for warning in warned), str(error).splitlines()[0]])
            return found | {"problem": said}
    found["is_null"] = is_null_gpu()
    if not found["is_right"] and not found["is_null"]:
        found["problem"] = "a product of ones is not the number of its terms on this device."
    return found


def _accelerator(torch: Any, device: Any) -> dict[str, Any]:  # a module that may not be there
    if device.type == "cpu":
        return {"name": _cpu()}
    if device.type != "cuda":
        return {"name": str(device)}
    properties = torch.cuda.get_device_properties(device)
    rows = _smi("--query-gpu=driver_version,power.limit")
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "free_bytes": torch.cuda.mem_get_info(device)[0],
        "multiprocessors": properties.multi_processor_count,
        "driver": rows[0][0] if rows else "unknown",
        "power_limit_w": _number(rows[0][1]) if rows else None,
    }


def _host() -> dict[str, Any]:
    return {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()}


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine()
    )


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1]) | {"versions": versions()}))
