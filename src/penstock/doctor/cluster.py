"""Cluster file for the planner from the doctor's measurements. Pure functions."""

from dataclasses import replace
from statistics import median
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.network.nics import usable
from penstock.devices.figures import DEVICES, Architecture, Device, device_named
from penstock.doctor.checks import corpus, devices, disk, interfaces, processors, speeds, ulimits
from penstock.doctor.report import DoctorReport
from penstock.plan.hardware import Cluster

_GIB = 2**30
_ARCHITECTURES: dict[int, Architecture] = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell"}
_ASSUMED_GBIT_S = 10.0
_NEEDED = (devices, processors, ulimits, speeds, disk)


def cluster_of(report: DoctorReport) -> tuple[Cluster, list[str]]:
    """Return the cluster of the examined machines, and notes on values that were assumed, not measured.

    Raises:
        PenstockError: the first machine could not be measured.
    """
    missing = [check.CHECK for check in _NEEDED if check.CHECK not in report.facts]
    if missing:
        raise PenstockError(
            f"No cluster file was written: not measured: {', '.join(missing)}", fix="Correct the red lines."
        )
    seen: devices.DeviceFacts = report.facts[devices.CHECK]
    network, assumed = _network(report)
    cluster = Cluster(
        name=f"{len(report.hosts)} of {next(iter(report.hosts.values()), 'this machine')}",
        nodes=max(1, len(report.hosts)),
        devices_per_node=len(seen.devices) or report.num_local,
        device=_accelerator(report) if seen.devices else _processor(report),
        disk_gb_s=max(_rounded(report.facts[disk.CHECK].written_bytes_s / 1e9), 0.001),
        loader_tokens_s=_rounded(served.tokens_s) if (served := report.facts.get(corpus.CHECK)) else 0.0,
        **network,
    )
    return cluster, assumed


def _network(report: DoctorReport) -> tuple[dict[str, Any], list[str]]:  # Any: fields of Cluster
    """Return the network fields of the cluster, and notes on assumed values."""
    facts, assumed = report.facts, []
    nics = usable(facts[interfaces.CHECK].nics) if interfaces.CHECK in facts else []
    between = [link for link in report.links if link.gbit_s and link.source_nic != "lo"]
    nominal = max((nic.speed_mbit_s or 0 for nic in nics if nic.has_true_speed), default=0) / 1000
    measured = min((link.gbit_s for link in between), default=0.0)
    found: dict[str, Any] = {
        "nics": max(1, len(nics)),
        "nic_gbit_s": _rounded(nominal or measured or _ASSUMED_GBIT_S),
        "transport": "rdma" if any(nic.rdma_devices for nic in nics) else "tcp",
    }
    if between:
        found["latency_us"] = _rounded(1e6 * median(link.round_trip_s for link in between) / 2)
    else:
        assumed.append("latency_us: one machine was examined")
    if not (nominal or measured):
        assumed.append(f"nic_gbit_s = {_ASSUMED_GBIT_S:g}: no interface says its speed, none was measured")
    if not facts[devices.CHECK].devices:  # NCCL is faster than the single gloo stream that was measured
        found["usable_gbit_s"] = _rounded(measured)
    return found, assumed


def _accelerator(report: DoctorReport) -> Device:
    """Return the first machine's device: a row of the planner's table, else the measured values."""
    seen, speed = report.facts[devices.CHECK], report.facts[speeds.CHECK]
    first: devices.DetectedDevice = seen.devices[0]
    memory_gib = first.memory_bytes / _GIB
    link_gb_s = _rounded(speed.link_bytes_s / 1e9)
    if known := device_named(first.name, memory_gib=memory_gib):
        return known
    return Device(
        name=first.name,
        architecture="ada"
        if first.capability == (8, 9)
        else _ARCHITECTURES.get(first.capability[0], "blackwell"),
        memory_gib=_rounded(memory_gib),
        memory_gb_s=_rounded(speed.memory_bytes_s / 1e9),
        bfloat16_tflops=_rounded(speed.bfloat16_flops / 1e12),
        float32_tflops=_rounded(speed.float32_flops / 1e12),
        link_gb_s=link_gb_s,
    )


def _processor(report: DoctorReport) -> Device:
    """Return a rank's share of the first machine's processors and memory."""
    facts, share = report.facts, report.num_local
    speed: speeds.SpeedFacts = facts[speeds.CHECK]
    local = [link.gbit_s for link in report.links if link.source_nic == "lo" and link.gbit_s]
    given = replace(
        DEVICES["CPU"],
        name=f"{facts[processors.CHECK].model} / {share}" if share > 1 else facts[processors.CHECK].model,
        memory_gib=_rounded(facts[ulimits.CHECK].memory_bytes / _GIB / share),
        memory_gb_s=_rounded(speed.memory_bytes_s / 1e9 / share),
        bfloat16_tflops=_rounded(speed.bfloat16_flops / 1e12 / share),
        float32_tflops=_rounded(speed.float32_flops / 1e12 / share),
    )
    return (
        replace(given, link_gb_s=_rounded(median(local) / 8), copy_gb_s=_rounded(median(local) / 8))
        if local
        else given
    )


def _rounded(value: float) -> float:
    """Return a value rounded to three significant digits."""
    return float(f"{value:.3g}")
