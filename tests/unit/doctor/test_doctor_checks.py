"""What each check says of made-up facts."""

import math
from dataclasses import replace
from typing import Any

import pytest

from penstock.core.network.nics import Nic
from penstock.doctor import consistency
from penstock.doctor.checks import (
    copies,
    corpus,
    devices,
    disk,
    gpus,
    interfaces,
    kernel,
    object_store,
    processors,
    speeds,
    ulimits,
    variables,
)
from penstock.doctor.checks.check import Check, Level, worst

GIB = 2**30
NIC = Nic(
    name="ens1",
    is_up=True,
    mtu=9000,
    speed_mbit_s=100_000,
    addresses=("10.0.0.2/24",),
    driver="mlx5_core",
    bus="0000:3b:00.0",
)
GPU = devices.DetectedDevice(name="A100", memory_bytes=80 * GIB, free_bytes=79 * GIB)
DEVICES = devices.DeviceFacts(
    torch="2.13", cuda="13.0", nccl="2.29", driver="580.1", num_cards=8, devices=(GPU,) * 8, cores=96
)
INTERFACES = interfaces.InterfaceFacts(nics=(NIC,), num_nodes=2)
VARIABLES = variables.VariableFacts(in_force={}, nics=(NIC,), num_nodes=2, num_devices=0)
KERNEL = kernel.KernelFacts(
    settings={
        "net.ipv4.tcp_rmem": "4096 131072 33554432",
        "net.ipv4.tcp_wmem": "4096 16384 33554432",
        "net.core.somaxconn": "4096",
        "net.ipv4.tcp_slow_start_after_idle": "0",
    },
    speed_mbit_s=100_000,
    num_nodes=2,
)
LIMITS = ulimits.UlimitFacts(
    open_files=65_536,
    locked_bytes=math.inf,
    shared_bytes=16 * GIB,
    memory_bytes=256 * GIB,
    num_devices=8,
    has_rdma=False,
)
PROCESSORS = processors.CpuFacts(
    model="EPYC",
    cores=96,
    granted=96,
    load=1.0,
    governor="performance",
    driver="acpi-cpufreq",
    huge_pages="madvise",
    numa_nodes=2,
)
DISK = disk.DiskFacts(
    folder="runs", file_system="ext4", free_bytes=900 * GIB, written_bytes_s=1e9, read_bytes_s=2e9
)
STORE = object_store.ObjectStoreFacts(
    url="s3://b/x", written_bytes_s=1e9, read_bytes_s=1e9, first_byte_s=0.02
)
CORPUS = corpus.LoaderFacts(name="web", tokens_s=5e6, first_batch_s=0.4, num_devices=8)
SPEEDS = speeds.SpeedFacts(kind="cuda", float32_flops=2e13, bfloat16_flops=3e14, memory_bytes_s=1.5e12)
CARD = gpus.Gpu(
    name="H100",
    bus="0000:3b:00.0",
    uncorrected_errors=0,
    corrected_errors=2,
    remapped_rows=1,
    is_remap_pending=False,
    has_remap_failed=False,
    throttle_bits=0x4,  # a power cap
    link_width=16,
    max_link_width=16,
)
CARDS = gpus.GpuFacts(gpus=(CARD,) * 8, on_the_bus=8)
COPIES = tuple(copies.DeviceCopies(index=n, to_bytes_s=25e9, from_bytes_s=24e9) for n in range(2))

SOUND: list[tuple[Check, Any]] = [
    (devices, DEVICES),
    (gpus, CARDS),
    (gpus, gpus.GpuFacts()),
    (gpus, gpus.GpuFacts(why_not="the package nvidia-ml-py is not installed")),
    (copies, COPIES),
    (copies, ()),
    (copies, (copies.DeviceCopies(index=0, is_in_use=True),)),
    (interfaces, INTERFACES),
    (variables, VARIABLES),
    (kernel, KERNEL),
    (ulimits, LIMITS),
    (processors, PROCESSORS),
    (disk, DISK),
    (object_store, STORE),
    (corpus, CORPUS),
    (speeds, SPEEDS),
]


def other(facts: Any, **over: object) -> Any:
    return replace(facts, **over)


BAD: list[tuple[Check, Any, Level, str]] = [
    (
        devices,
        other(DEVICES, devices=(), cuda=""),
        Level.RED,
        "sees 8 cards; torch 2.13 was built without CUDA",
    ),
    (devices, other(DEVICES, devices=()), Level.RED, "can use none"),
    (devices, other(DEVICES, devices=(GPU,) * 7), Level.YELLOW, "7 of 8 cards"),
    (devices, other(DEVICES, devices=(GPU, replace(GPU, name="L4"))), Level.YELLOW, "differ: A100, L4"),
    (
        devices,
        other(DEVICES, devices=(GPU,) * 7 + (replace(GPU, free_bytes=9 * GIB),)),
        Level.YELLOW,
        "Device 7 has 9.0 GiB of 80.0 GiB free",
    ),
    (gpus, other(CARDS, expected=9), Level.RED, "has 8 working GPUs of 9"),
    (gpus, other(CARDS, gpus=(CARD,) * 7), Level.RED, "has 7 working GPUs of 8"),
    (gpus, other(CARDS, gpus=(), on_the_bus=1), Level.RED, "has 0 working GPUs of 1"),
    (
        gpus,
        other(CARDS, gpus=(CARD,) * 8, lost=("GPU 3: GPU is lost",)),
        Level.RED,
        "cannot read GPU 3: GPU is lost",
    ),
    (
        gpus,
        other(CARDS, why_not="the package nvidia-ml-py is not installed"),
        Level.YELLOW,
        "Not measured, with 8 GPUs expected: the package nvidia-ml-py",
    ),
    (
        gpus,
        gpus.GpuFacts(gpus=(other(CARD, uncorrected_errors=3),), on_the_bus=1),
        Level.RED,
        "The H100 at 0000:3b:00.0 has 3 uncorrected ECC errors",
    ),
    (
        gpus,
        gpus.GpuFacts(gpus=(other(CARD, has_remap_failed=True, is_remap_pending=True),), on_the_bus=1),
        Level.RED,
        "no spare one left",
    ),
    (
        gpus,
        gpus.GpuFacts(gpus=(other(CARD, is_remap_pending=True),), on_the_bus=1),
        Level.YELLOW,
        "replaces a bad row of memory at its next reset",
    ),
    *(
        (gpus, gpus.GpuFacts(gpus=(other(CARD, throttle_bits=bit | 0x4),), on_the_bus=1), level, words)
        for bit, level, words in (
            (0x8, Level.RED, "held back by hardware slowdown"),
            (0x40, Level.RED, "held back by hardware thermal slowdown"),
            (0x80, Level.RED, "held back by power brake"),
            (0x20, Level.YELLOW, "lowers its clocks because it is warm"),
        )
    ),
    (
        gpus,
        gpus.GpuFacts(gpus=(other(CARD, link_width=8),), on_the_bus=1),
        Level.YELLOW,
        "uses 8 of 16 PCIe lanes",
    ),
    (
        copies,
        (*COPIES, copies.DeviceCopies(index=2, to_bytes_s=25e9, from_bytes_s=12e9)),
        Level.YELLOW,
        "Copies from device 2 run at 12 GB/s, below 16.8",
    ),
    (
        copies,
        (copies.DeviceCopies(index=0, to_bytes_s=1.5e9, from_bytes_s=24e9),),
        Level.YELLOW,
        "Copies to device 0 run at 1.5 GB/s",
    ),
    (
        interfaces,
        other(INTERFACES, nics=()),
        Level.RED,
        "No interface leads to other machines: there is none",
    ),
    (
        interfaces,
        other(INTERFACES, nics=(NIC, replace(NIC, name="ens2", is_up=False, addresses=()))),
        Level.YELLOW,
        "ens2 (mlx5_core) is down",
    ),
    (
        interfaces,
        other(INTERFACES, nics=(NIC, replace(NIC, name="eth9", bus="", is_up=False))),
        Level.RED,
        "eth9 has the address 10.0.0.2 and is down",
    ),
    (
        interfaces,
        other(INTERFACES, nics=(replace(NIC, speed_mbit_s=1000),)),
        Level.YELLOW,
        "runs at 1 Gbit/s",
    ),
    (
        interfaces,
        other(INTERFACES, nics=(replace(NIC, mtu=1500),)),
        Level.YELLOW,
        "MTU of 1500 at 100 Gbit/s",
    ),
    (
        interfaces,
        other(INTERFACES, nics=(NIC, replace(NIC, name="ens2"))),
        Level.YELLOW,
        "ens1 and ens2 are both in 10.0.0.0/24",
    ),
    (
        variables,
        other(VARIABLES, in_force={"GLOO_SOCKET_IFNAME": "ens9"}),
        Level.RED,
        "this machine has no 'ens9'",
    ),
    (
        variables,
        other(VARIABLES, in_force={"NCCL_SOCKET_IFNAME": "lo"}),
        Level.RED,
        "the loopback reaches no",
    ),
    (
        variables,
        other(VARIABLES, in_force={"NCCL_P2P_DISABLE": "1"}),
        Level.YELLOW,
        "NCCL_P2P_DISABLE=1: devices",
    ),
    (
        variables,
        other(VARIABLES, nics=(NIC, replace(NIC, name="ens2"))),
        Level.YELLOW,
        "GLOO_SOCKET_IFNAME is not set: the 2 interfaces",
    ),
    (variables, other(VARIABLES, num_devices=8), Level.YELLOW, "NCCL_SOCKET_NTHREADS is not set"),
    (
        kernel,
        other(KERNEL, settings={"net.ipv4.tcp_wmem": "4096 16384 4194304"}),
        Level.YELLOW,
        "net.ipv4.tcp_wmem lets a connection have 4.0 MiB on its way",
    ),
    (kernel, other(KERNEL, settings={"net.core.somaxconn": "128"}), Level.YELLOW, "somaxconn is 128"),
    (
        kernel,
        other(KERNEL, settings={"net.ipv4.tcp_slow_start_after_idle": "1"}),
        Level.YELLOW,
        "connections start slowly",
    ),
    (ulimits, other(LIMITS, open_files=1024), Level.YELLOW, "may open 1,024 files"),
    (ulimits, other(LIMITS, has_rdma=True, locked_bytes=65_536), Level.RED, "may lock 64.0 KiB"),
    (ulimits, other(LIMITS, shared_bytes=2**26), Level.RED, "/dev/shm has 64.0 MiB free"),
    (ulimits, other(LIMITS, shared_bytes=2**26, num_devices=0), Level.YELLOW, "/dev/shm has 64.0 MiB free"),
    (processors, other(PROCESSORS, governor="powersave"), Level.YELLOW, "governor 'powersave'"),
    (processors, other(PROCESSORS, huge_pages="never"), Level.YELLOW, "huge pages are off"),
    (processors, other(PROCESSORS, load=70.0), Level.YELLOW, "a load of 70.0 on 96 cores"),
    (disk, other(DISK, free_bytes=2**29), Level.RED, "runs has 512.0 MiB free"),
    (disk, other(DISK, free_bytes=9 * GIB), Level.YELLOW, "runs has 9.0 GiB free, less than two"),
    (disk, other(DISK, file_system="tmpfs"), Level.YELLOW, "lies in memory (tmpfs)"),
    (disk, other(DISK, written_bytes_s=1.2e7), Level.YELLOW, "a checkpoint of a model of 1B takes 1000 s"),
    (object_store, other(STORE, read_bytes_s=1e6), Level.YELLOW, "gives or takes less than"),
    (corpus, other(CORPUS, tokens_s=2e4), Level.YELLOW, "the loader gives 20k"),
]


@pytest.mark.parametrize(
    ("check", "facts"), SOUND, ids=[f"{number}-{check.__name__}" for number, (check, _) in enumerate(SOUND)]
)  # type: ignore[attr-defined]
def test_what_is_sound_is_green_and_asks_for_nothing(check: Check, facts: Any) -> None:
    found = list(check.judge(facts))
    assert found
    assert all((finding.level, finding.remedy) == (Level.GREEN, "") for finding in found), found


@pytest.mark.parametrize(("check", "facts", "level", "words"), BAD, ids=[case[3] for case in BAD])
def test_what_is_bad_is_named_with_its_value_and_a_remedy(
    check: Check, facts: Any, level: Level, words: str
) -> None:
    found = list(check.judge(facts))
    named = [finding for finding in found if words in finding.what]
    assert [finding.level for finding in named] == [level], found
    assert all(finding.remedy for finding in named)
    assert worst(found) is level


def test_a_machine_without_accelerators_is_no_fault() -> None:
    (found,) = devices.judge(devices.DeviceFacts(torch="2.13+cpu", cores=2))
    assert (found.level, found.what) == (Level.GREEN, "No accelerator: 2 CPU cores, torch 2.13+cpu")


def test_one_machine_needs_no_network() -> None:
    assert worst(interfaces.judge(other(INTERFACES, nics=(), num_nodes=1))) is Level.GREEN
    assert (
        worst(kernel.judge(other(KERNEL, settings={"net.core.somaxconn": "1"}, num_nodes=1))) is Level.GREEN
    )
    alone = other(VARIABLES, in_force={"GLOO_SOCKET_IFNAME": "lo"}, num_nodes=1)
    assert worst(variables.judge(alone)) is Level.GREEN


def test_variables_as_advised_are_green_with_or_without_nccls_sign_of_exactness() -> None:
    in_force = {setting.name: setting.value.lstrip("=") for setting in variables.advised(VARIABLES)}
    assert worst(variables.judge(other(VARIABLES, in_force=in_force))) is Level.GREEN


def test_the_powersave_of_intels_driver_is_no_fault() -> None:
    assert (
        worst(processors.judge(other(PROCESSORS, governor="powersave", driver="intel_pstate"))) is Level.GREEN
    )


def test_what_was_not_asked_for_is_not_spoken_of() -> None:
    assert list(object_store.judge(None)) == list(corpus.judge(None)) == []


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    mounts = "/dev/sda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
    assert disk.file_system_of(disk.Path("/dev/shm/x"), mounts) == "tmpfs"
    assert disk.file_system_of(disk.Path("/dev/shmem"), mounts) == "ext4"
    assert disk.file_system_of(disk.Path("/x"), "") == "unknown"


def test_nodes_that_differ_are_named_the_fewest_first() -> None:
    traits = {node: {"torch": "2.13", "cores": "96"} for node in range(6)}
    traits[4] = {"torch": "2.11", "cores": "96"}
    (found,) = consistency.judge_sameness(traits)
    assert (found.level, found.what) == (Level.RED, "torch differs: 2.11 on node 4; 2.13 on 5 nodes")
    traits = {0: {"kernel": "6.1"}, 1: {"kernel": "6.8"}, 2: {}}
    (found,) = consistency.judge_sameness(traits)
    assert found.level is Level.YELLOW
