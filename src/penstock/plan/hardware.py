"""What machines can do: a table of devices, and a cluster of them as a TOML file says it; no torch.

    name = "sixteen machines of eight"
    nodes = 16
    devices_per_node = 8
    device = "A100-80GB"        # a row of DEVICES, or a table [device] with the fields of Device
    nics = 2
    nic_gbit_s = 100
    transport = "tcp"
    latency_us = 30
    price_per_node_hour = 32.8

Figures of the table are those of the vendors' data sheets: dense products (no structured sparsity), memory
in both directions, links in one. What of them a training step sees is the business of `constants.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from penstock.core import config as configs
from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.core.files import write_atomic
from penstock.obs.toml import toml_text

Architecture = Literal["cpu", "volta", "ampere", "ada", "hopper", "blackwell"]
Transport = Literal["tcp", "rdma"]

_BITS_OF_BYTE = 8
_TCP_SHARE, _RDMA_SHARE = 0.95, 0.92
_SAME_MEMORY = 0.12
"""What torch says of a device's memory is up to this share less than its data sheet."""
TCP_GBIT_S = 60.0
"""What TCP moves through one fast NIC: 120 of 200 nominal Gbit/s through two, as IBM and PyTorch state
(pytorch.org/blog/scaling-pytorch-fsdp-for-training-foundation-models-on-ibm-cloud)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device: a GPU, or the share of a machine's CPU that one rank has."""

    name: str
    architecture: Architecture
    """Decides which share of the peaks large products reach."""
    memory_gib: float
    memory_gb_s: float
    """Both directions together, 10^9 bytes a second."""
    bfloat16_tflops: float
    """Dense, with float32 sums."""
    float32_tflops: float
    float8_tflops: float = 0.0
    """0: it has no 8-bit products."""
    link_gb_s: float = 0.0
    """To the other devices of its machine, in one direction: NVLink, or else PCIe."""
    power_share: float = 1.0
    """Power limit over that of the data sheet's device; clocks follow its cube root."""
    launch_us: float = 6.0
    """Host time to start one kernel; what an eager step cannot be faster than."""
    operation_us: float = 0.0
    """CPU: fixed time of one collective, beyond the network's latency."""
    copy_gb_s: float = 0.0
    """CPU: bytes that a rank copies into and out of sockets per second, which computing then lacks. 0: a
    device whose links work by themselves."""

    def __post_init__(self) -> None:
        for name in ("memory_gib", "memory_gb_s", "bfloat16_tflops", "float32_tflops", "power_share"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"device.{name} must be above 0", got=getattr(self, name))
        for name in ("float8_tflops", "link_gb_s", "launch_us", "operation_us", "copy_gb_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"device.{name} must be 0 or more", got=getattr(self, name))


def _gpu(name: str, architecture: Architecture, figures: str, *, power_share: float = 1.0) -> Device:
    """Read memory GiB / memory GB/s / bfloat16 / float32 / float8 TFLOP/s / link GB/s."""
    memory, bandwidth, bfloat16, float32, float8, link = map(float, figures.split("/"))
    return Device(
        name=name,
        architecture=architecture,
        memory_gib=memory,
        memory_gb_s=bandwidth,
        bfloat16_tflops=bfloat16,
        float32_tflops=float32,
        float8_tflops=float8,
        link_gb_s=link,
        power_share=power_share,
    )


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("V100-32GB", "volta", "32/900/125/15.7/0/150"),  # its 125 are float16
        _gpu("A10G", "ampere", "24/600/70/31/0/32"),
        _gpu("A100-40GB", "ampere", "40/1555/312/19.5/0/300"),
        _gpu("A100-80GB", "ampere", "80/2039/312/19.5/0/300"),
        _gpu("L4", "ada", "24/300/121/30/242/32"),
        _gpu("L40S", "ada", "48/864/362/91.6/733/32"),
        _gpu("H100-80GB", "hopper", "80/3350/989/67/1979/450"),
        _gpu("H100-PCIe", "hopper", "80/2000/756/51/1513/64"),
        _gpu("H100-96GB-500W", "hopper", "96/2400/989/67/1979/450", power_share=500 / 700),
        _gpu("H200", "hopper", "141/4800/989/67/1979/450"),
        _gpu("B200", "blackwell", "180/8000/2250/80/4500/900"),
        Device(
            name="CPU",
            architecture="cpu",
            memory_gib=16,
            memory_gb_s=20,
            bfloat16_tflops=0.05,
            float32_tflops=0.05,
            link_gb_s=2.0,
            launch_us=5.0,
            operation_us=200.0,
            copy_gb_s=0.6,
        ),
    )
}
"""By name. H100-96GB-500W is that of Meta's Grand Teton machines (HBM2e), on which torchtitan's figures were
measured. CPU is a placeholder: `penstock doctor` measures the machine's own."""


def device_named(name: str, *, memory_gib: float) -> Device | None:
    """Return the planner's device of a name as its driver gives it; None where there are no figures.

    Words must match: an L40 is no L4, and a part of a card (MIG) is not the card.

    >>> device_named("NVIDIA A100-SXM4-80GB", memory_gib=79.3).name
    'A100-80GB'
    >>> device_named("NVIDIA H100 PCIe", memory_gib=79.2).name
    'H100-PCIe'
    """
    words = re.split(r"[ -]", name)
    for row in DEVICES.values():
        family, *rest = row.name.split("-")
        if (
            family in words
            and ("PCIe" in rest) == ("PCIe" in words and family == "H100")
            and abs(memory_gib / row.memory_gib - 1) < _SAME_MEMORY
        ):
            return row
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal machines with equal devices, joined by one network."""

    name: str = ""
    nodes: int = 1
    devices_per_node: int = 8
    device: Device
    nics: int = 1
    nic_gbit_s: float = 100.0
    """Nominal, of each."""
    usable_gbit_s: float = 0.0
    """What a collective gets from each NIC, if it was measured. 0: 95% of the nominal by TCP, at most 60
    Gbit/s (see TCP_GBIT_S), 92% by RDMA."""
    transport: Transport = "tcp"
    latency_us: float = 30.0
    """Of a message between machines, one way, through the library that sends it."""
    price_per_node_hour: float = 0.0
    """In any currency; 0: not known."""
    disk_gb_s: float = 1.0
    """That a node writes its share of a checkpoint with."""
    loader_tokens_s: float = 0.0
    """That the loader serves one rank, if it was measured. 0: enough."""
    straggling: float = -1.0
    """Spread of step times between devices (standard deviation / mean), if it was measured. -1: the usual."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node", "nics"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more", got=getattr(self, name))
        for name in ("nic_gbit_s", "disk_gb_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0", got=getattr(self, name))
        for name in ("usable_gbit_s", "latency_us", "price_per_node_hour", "loader_tokens_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more", got=getattr(self, name))
        if self.devices_per_node > 1 and not self.device.link_gb_s:
            raise ConfigError(
                "device.link_gb_s is missing, and there are several devices in a node",
                got=self.device.link_gb_s,
                fix="Give the speed of NVLink or PCIe in one direction, in GB/s.",
            )

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @property
    def node_bytes_s(self) -> float:
        """Bytes a second that a node sends and, at the same time, receives."""
        by_tcp = min(_TCP_SHARE * self.nic_gbit_s, TCP_GBIT_S)
        usable = by_tcp if self.transport == "tcp" else _RDMA_SHARE * self.nic_gbit_s
        return self.nics * (self.usable_gbit_s or usable) * 1e9 / _BITS_OF_BYTE

    @property
    def latency_s(self) -> float:
        """Of a message between machines."""
        return self.latency_us / 1e6

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:  # Any: what TOML holds
        """Build a cluster from the values of its file.

        Raises:
            ConfigError: an unknown key or device, or a value of no meaning.
        """
        device = raw.get("device")
        if not isinstance(device, str):
            return configs.build(cls, raw)
        if device not in DEVICES:
            raise ConfigError("Unknown device", got=device, fix=nearest(device, list(DEVICES)))
        return configs.build(cls, {**raw, "device": asdict(DEVICES[device])})

    def as_toml(self) -> str:
        """Return the text that `read` reads back; a device of the table by its name."""
        values = configs.dump(self)
        if DEVICES.get(self.device.name) == self.device:
            values["device"] = self.device.name
        return toml_text(values) + "\n"


def load_cluster(path: Path) -> Cluster:
    """Read a cluster.toml.

    Raises:
        UsageError: there is no such file.
        ConfigError: it is no TOML, or describes no cluster; the message begins with its path.
    """
    if not path.is_file():
        raise UsageError(
            f"Cluster file {path} does not exist",
            fix="`penstock doctor` writes one for the machines it runs on; docs/planner.md has examples.",
        )
    try:
        return Cluster.read(configs.load_toml(path))
    except ConfigError as error:
        error.add_note(f"in {path}")
        raise


def write(cluster: Cluster, path: Path) -> None:
    """Write a cluster.toml that `load_cluster` reads back to an equal cluster."""
    write_atomic(path, cluster.as_toml())
