"""What the planner is told of machines that were examined."""

import math
from typing import Any

import pytest

from penstock.core.errors import PenstockError
from penstock.core.network.nics import Nic
from penstock.devices.figures import DEVICES, device_named
from penstock.doctor.checks import devices, disk, interfaces, processors, speeds, ulimits
from penstock.doctor.cluster import cluster_of
from penstock.doctor.link import LinkFault, LinkMeasurement
from penstock.doctor.report import DoctorReport
from penstock.plan.hardware import load_cluster, write

GIB = 2**30


def facts_of(**over: Any) -> dict[str, Any]:
    nic = Nic(name="ens1", is_up=True, mtu=9000, addresses=("10.0.0.2/24",), driver="veth")
    return {
        devices.CHECK: devices.DeviceFacts(torch="2.13", cores=4),
        processors.CHECK: processors.CpuFacts(
            model="EPYC", cores=4, granted=4, load=0, governor="", driver="", huge_pages="", numa_nodes=1
        ),
        ulimits.CHECK: ulimits.UlimitFacts(
            open_files=math.inf, locked_bytes=math.inf, shared_bytes=GIB, memory_bytes=32 * GIB,
            num_devices=0, has_rdma=False,
        ),
        speeds.CHECK: speeds.SpeedFacts(
            kind="cpu", float32_flops=2e11, bfloat16_flops=4e11, memory_bytes_s=4e10, link_bytes_s=0.0
        ),
        disk.CHECK: disk.DiskFacts(
            folder="x", file_system="ext4", free_bytes=GIB, written_bytes_s=4e8, read_bytes_s=1e9
        ),
        interfaces.CHECK: interfaces.InterfaceFacts(nics=(nic,), num_nodes=2),
        **over,
    }  # fmt: skip


def report_of(
    *links: LinkMeasurement, facts: dict[str, Any] | None = None, nodes: int = 2, local: int = 2
) -> DoctorReport:
    hosts = {node: f"host{node}" for node in range(nodes)}
    return DoctorReport(
        num_nodes=nodes,
        hosts=hosts,
        findings=[],
        facts=facts or facts_of(),
        links=list(links),
        num_local=local,
        seconds=1.0,
    )


def link(gbit_s: float, nic: str = "ens1", fault: LinkFault = LinkFault.NONE) -> LinkMeasurement:
    return LinkMeasurement(
        source=0, target=1, source_nic=nic, target_nic=nic, gbit_s=gbit_s, round_trip_s=2e-4, fault=fault
    )


def test_a_cluster_of_cpus_has_the_measured_shares_and_the_slowest_link() -> None:
    cluster, assumed = cluster_of(report_of(link(0.4), link(0.5), link(0.0, fault=LinkFault.STALLS)))
    assert (cluster.nodes, cluster.devices_per_node, cluster.nics) == (2, 2, 1)
    assert (cluster.nic_gbit_s, cluster.usable_gbit_s, cluster.latency_us) == (0.4, 0.4, 100)
    device = cluster.device
    assert (device.architecture, device.memory_gib, device.float32_tflops) == ("cpu", 16, 0.1)
    assert cluster.disk_gb_s == 0.4
    assert cluster.loader_tokens_s == 0, "no corpus was asked for"
    assert assumed == []


def test_what_nobody_measured_is_told() -> None:
    cluster, assumed = cluster_of(report_of(link(40.0, nic="lo"), nodes=1))
    assert (cluster.device.copy_gb_s, cluster.device.link_gb_s) == (5.0, 5.0)
    assert [line.split()[0].rstrip(":") for line in assumed] == ["latency_us", "nic_gbit_s"]


@pytest.mark.parametrize(
    ("name", "memory_gib", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 79.3, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80GB"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA L4", 22.2, "L4"),
        ("NVIDIA L40S", 44.5, "L40S"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
    ],
)
def test_devices_are_found_in_the_planners_table(name: str, memory_gib: float, row: str) -> None:
    assert device_named(name, memory_gib=memory_gib) is DEVICES[row]


def test_a_device_the_table_lacks_is_described_by_what_was_measured() -> None:
    gpu = devices.DetectedDevice(
        name="NVIDIA RTX 6000 Ada", memory_bytes=48 * GIB, free_bytes=47 * GIB, capability=(8, 9)
    )
    seen = devices.DeviceFacts(torch="2.13", cuda="13.0", devices=(gpu, gpu), cores=32)
    speed = speeds.SpeedFacts(
        kind="cuda", float32_flops=9e13, bfloat16_flops=3e14, memory_bytes_s=9e11, link_bytes_s=2.5e10
    )
    facts = facts_of(**{devices.CHECK: seen, speeds.CHECK: speed})
    cluster, _ = cluster_of(report_of(link(9.0), facts=facts))
    assert (cluster.device.name, cluster.device.architecture) == ("NVIDIA RTX 6000 Ada", "ada")
    assert (cluster.device.link_gb_s, cluster.devices_per_node) == (25, 2)
    assert cluster.usable_gbit_s == 0  # one stream of gloo says little of what NCCL's several get


def test_the_file_reads_back(tmp_path: Any) -> None:
    cluster, _ = cluster_of(report_of(link(0.4)))
    write(cluster, tmp_path / "cluster.toml")
    assert load_cluster(tmp_path / "cluster.toml") == cluster


def test_a_machine_that_could_not_be_measured_gives_no_cluster() -> None:
    facts = facts_of()
    del facts[disk.CHECK]
    with pytest.raises(PenstockError, match=r"No cluster file was written: not measured: disk\. Correct"):
        cluster_of(report_of(facts=facts))
