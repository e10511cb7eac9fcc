"""Check: health of NVIDIA GPUs as their driver reports it: count, ECC, row remapping, throttling, PCIe links.

`measure` only reads, through NVML (the package nvidia-ml-py): it takes no memory of a GPU and disturbs no
job. Xid errors are events, which dcgm-exporter and node-problem-detector report (docs/how-to/check-nodes.md).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.core.units import plural
from penstock.doctor.checks.check import CheckOptions, Finding, green, red, yellow
from penstock.doctor.checks.proc_files import text_of

CHECK = "gpus"

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # display and 3D controllers
_THROTTLED: dict[str, tuple[int, str]] = {
    "hardware slowdown": (0x8, "Its clocks are halved or worse: check power supply and cooling."),
    "hardware thermal slowdown": (0x40, "It is too hot: check fans, air flow and the thermal paste."),
    "power brake": (0x80, "The power supply asks for less: check its redundancy and its cables."),
}
"""Reason -> bit of NVML's clock event reasons, and remedy. Other reasons, such as a power cap, are normal."""
_WARM = 0x20  # software thermal slowdown
_RESET = "Drain the node and reset the GPU (nvidia-smi --gpu-reset), or restart the machine."


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """State of one GPU; None: it does not report that."""

    name: str
    bus: str
    """PCI address, such as 0000:3b:00.0."""
    uncorrected_errors: int | None = None
    """ECC errors of its memory that were not corrected, since the driver was loaded."""
    corrected_errors: int | None = None
    remapped_rows: int | None = None
    """Rows of memory that are replaced by spare ones, for good."""
    is_remap_pending: bool | None = None
    """True if a row is replaced at the next reset."""
    has_remap_failed: bool | None = None
    """True if there was no spare row left."""
    throttle_bits: int | None = None
    """NVML's clock event reasons."""
    link_width: int | None = None
    """PCIe lanes in use."""
    max_link_width: int | None = None
    """PCIe lanes that GPU and slot support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """GPUs of the machine."""

    gpus: tuple[Gpu, ...] = ()
    why_not: str = ""
    """Reason that NVML could not be read; empty: it was read."""
    on_the_bus: int = 0
    """NVIDIA GPUs among the PCI devices."""
    expected: int | None = None
    """Number of GPUs that the machine should have; None: as many as are on the bus."""
    lost: tuple[str, ...] = ()
    """GPUs that the driver lists and cannot read, with its error."""


def measure(options: CheckOptions) -> GpuFacts:
    """Read the state of all GPUs through NVML."""
    found = GpuFacts(on_the_bus=_on_the_bus(_PCI), expected=options.expected_gpus)
    return read_nvml(found)


def read_nvml(found: GpuFacts) -> GpuFacts:
    """Return the facts with what NVML reports, or with why it does not."""
    try:
        import pynvml as nvml
    except ImportError:
        return replace(found, why_not="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return replace(found, why_not=f"NVML: {error}")
    try:
        gpus, lost = [], []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_read(nvml, index))
            except nvml.NVMLError as error:
                lost.append(f"GPU {index}: {error}")
        return replace(found, gpus=tuple(gpus), lost=tuple(lost))
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> Gpu:  # Any: a module without types
    """Read one GPU; what it does not support is None."""
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: object) -> Any:  # Any: each query has its own result
        try:
            return getattr(nvml, name)(device, *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return None

    def errors(kind: int) -> int | None:
        found: int | None = ask("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC)
        return found

    corrected, uncorrected, pending, failed = ask("nvmlDeviceGetRemappedRows") or (None,) * 4
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(device)),
        bus=_text(nvml.nvmlDeviceGetPciInfo(device).busId).lower()[-12:],
        uncorrected_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        corrected_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        remapped_rows=None if corrected is None else corrected + uncorrected,
        is_remap_pending=None if pending is None else bool(pending),
        has_remap_failed=None if failed is None else bool(failed),
        throttle_bits=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        link_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        max_link_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _on_the_bus(folder: Path) -> int:
    """Return the number of NVIDIA GPUs among the PCI devices."""
    found = folder.glob("*") if folder.is_dir() else ()
    return sum(
        text_of(device / "vendor").strip() == _NVIDIA and text_of(device / "class").startswith(_GPU_CLASSES)
        for device in found
    )


def judge(facts: GpuFacts) -> Iterator[Finding]:
    """Judge the number of GPUs, and the state of each."""
    expected = facts.on_the_bus if facts.expected is None else facts.expected
    if facts.why_not:
        if expected:
            yield yellow(
                f"Not measured, with {plural(expected, 'GPU')} expected: {facts.why_not}",
                remedy="pip install 'penstock[monitor]', and let the container have the driver's utilities "
                "(NVIDIA_VISIBLE_DEVICES=all, NVIDIA_DRIVER_CAPABILITIES=utility,compute).",
            )
        else:
            yield green(f"Not measured: {facts.why_not}")
        return
    for gone in facts.lost:
        yield red(f"The driver cannot read {gone}", remedy=_RESET)
    if len(facts.gpus) != expected:
        yield red(
            f"The driver has {plural(len(facts.gpus), 'working GPU')} of {expected}",
            remedy="A card may have fallen off the bus: see `dmesg | grep -i xid`, and restart the machine. "
            "If the number expected is wrong, set --expect-gpus.",
        )
    bad = [finding for gpu in facts.gpus for finding in _judge_one(gpu)]
    yield from bad
    if not bad and facts.gpus:
        remapped = sum(gpu.remapped_rows or 0 for gpu in facts.gpus)
        yield green(
            f"{plural(len(facts.gpus), 'GPU')}: no uncorrected ECC error since the driver was loaded, "
            f"{plural(remapped, 'remapped row')}, no throttling"
        )
    elif not facts.gpus and not expected and not facts.lost:
        yield green("No NVIDIA GPU")


def _judge_one(gpu: Gpu) -> Iterator[Finding]:
    who = f"The {gpu.name} at {gpu.bus}"
    rules: list[tuple[bool, Callable[..., Finding], str, str]] = [
        (
            bool(gpu.has_remap_failed),
            red,
            "has a bad row of memory and no spare one left",
            "Have the card replaced.",
        ),
        (
            bool(gpu.uncorrected_errors),
            red,
            f"has {gpu.uncorrected_errors} uncorrected ECC errors since the driver was loaded",
            _RESET,
        ),
        (
            bool(gpu.is_remap_pending) and not gpu.has_remap_failed,
            yellow,
            "replaces a bad row of memory at its next reset",
            _RESET,
        ),
        (
            bool((gpu.throttle_bits or 0) & _WARM),
            yellow,
            "lowers its clocks because it is warm",
            "Check the air flow of the machine.",
        ),
        (
            (gpu.link_width or 0) < (gpu.max_link_width or 0),
            yellow,
            f"uses {gpu.link_width} of {gpu.max_link_width} PCIe lanes",
            "Check its slot, riser and power plug: a card that sits badly loses lanes.",
        ),
    ]
    for applies, level, what, remedy in rules:
        if applies:
            yield level(f"{who} {what}", remedy=remedy)
    for name, (bit, remedy) in _THROTTLED.items():
        if (gpu.throttle_bits or 0) & bit:
            yield red(f"{who} is held back by {name}", remedy=remedy)
