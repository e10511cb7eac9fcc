"""Clusters of devices from TOML files, also those shipped with Penstock; no torch.

    name = "sixteen machines of eight"
    nodes = 16
    devices_per_node = 8
    device = "A100-80GB"        # a row of DEVICES, or a table [device] with the fields of Device
    nics = 2
    nic_gbit_s = 100
    transport = "tcp"
    latency_us = 30
    price_per_node_hour = 32.8

The devices' data sheets are in `penstock/devices/figures.py`; `compute.py` derives the speed of a training
step from them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

from penstock.core import config as configs
from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.core.files import write_atomic
from penstock.core.toml import toml_text
from penstock.devices.figures import DEVICES, Device

Transport = Literal["tcp", "rdma"]

_BITS_OF_BYTE = 8
_TCP_SHARE, _RDMA_SHARE = 0.95, 0.92
TCP_GBIT_S = 60.0
"""Speed of TCP through one fast NIC: 120 of 200 nominal Gbit/s through two, as IBM and PyTorch report
(pytorch.org/blog/scaling-pytorch-fsdp-for-training-foundation-models-on-ibm-cloud)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal machines with equal devices, joined by one network."""

    name: str = ""
    nodes: int = 1
    devices_per_node: int = 8
    device: Device
    nics: int = 1
    nic_gbit_s: float = 100.0
    """Nominal speed of each NIC."""
    usable_gbit_s: float = 0.0
    """Measured speed of a collective per NIC. 0: not measured; 95% of the nominal speed by TCP, at most 60
    Gbit/s (see TCP_GBIT_S), 92% by RDMA."""
    transport: Transport = "tcp"
    latency_us: float = 30.0
    """One-way latency of a message between machines, including the library that sends it."""
    price_per_node_hour: float = 0.0
    """Price in any currency; 0: unknown."""
    disk_gb_s: float = 1.0
    """Speed at which a node writes its share of a checkpoint."""
    loader_tokens_s: float = 0.0
    """Measured tokens per second of the loader for one rank. 0: fast enough."""
    straggling: float = -1.0
    """Measured spread of step times between devices (standard deviation / mean). -1: the usual value."""

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
                "device.link_gb_s is missing, but a node has several devices",
                got=self.device.link_gb_s,
                fix="Give the speed of NVLink or PCIe in one direction, in GB/s.",
            )

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def node_bytes_s(self) -> float:
        """Bytes per second that a node can send while receiving as many."""
        by_tcp = min(_TCP_SHARE * self.nic_gbit_s, TCP_GBIT_S)
        usable = by_tcp if self.transport == "tcp" else _RDMA_SHARE * self.nic_gbit_s
        return self.nics * (self.usable_gbit_s or usable) * 1e9 / _BITS_OF_BYTE

    @property
    def latency_s(self) -> float:
        """Latency of a message between machines in seconds."""
        return self.latency_us / 1e6

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:  # Any: what TOML holds
        """Build a cluster from the values of its file.

        Raises:
            ConfigError: an unknown key or device, or an invalid value.
        """
        device = raw.get("device")
        if not isinstance(device, str):
            return configs.build(cls, raw)
        if device not in DEVICES:
            raise ConfigError("Unknown device", got=device, fix=nearest(device, list(DEVICES)))
        return configs.build(cls, {**raw, "device": asdict(DEVICES[device])})

    def as_toml(self) -> str:
        """Return the TOML text that `read` reads back; a device of the table by its name."""
        values = configs.dump(self)
        if DEVICES.get(self.device.name) == self.device:
            values["device"] = self.device.name
        return toml_text(values) + "\n"


def load_cluster(path: Path) -> Cluster:
    """Read a cluster.toml.

    Raises:
        UsageError: there is no such file.
        ConfigError: it is not valid TOML, or not a cluster; the message begins with its path.
    """
    if not path.is_file():
        raise UsageError(
            f"Cluster file {path} does not exist",
            fix="`penstock doctor` writes one for the machines it runs on; "
            "docs/how-to/plan-a-run.md has an example.",
        )
    try:
        return Cluster.read(configs.load_toml(path))
    except ConfigError as error:
        error.add_note(f"in {path}")
        raise


def write(cluster: Cluster, path: Path) -> None:
    """Write a cluster.toml that `load_cluster` reads back to an equal cluster."""
    write_atomic(path, cluster.as_toml())


_SUFFIX = ".toml"


def cluster_names() -> list[str]:
    """Return the names of the shipped clusters, in alphabetical order."""
    found = (entry.name for entry in files("penstock").joinpath("recipes", "clusters").iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))


def cluster_of(name: str) -> Cluster:
    """Return the cluster of a file, or a shipped one by its name.

    Raises:
        UsageError: there is none.
        ConfigError: the file does not describe a cluster.
    """
    if name.endswith(_SUFFIX):
        return load_cluster(Path(name))
    known = cluster_names()
    if name not in known:
        raise UsageError(
            "No cluster of this name comes with Penstock",
            got=name,
            fix=f"{nearest(name, known)} Or give the path of a .toml file.",
        )
    text = files("penstock").joinpath("recipes", "clusters", f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    return Cluster.read(tomllib.loads(text))
