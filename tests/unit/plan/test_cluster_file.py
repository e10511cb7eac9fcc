"""cluster.toml: read, written back, and refused with words that help."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, UsageError
from penstock.devices.figures import DEVICES
from penstock.plan.hardware import Cluster, load_cluster, write

VELA = """
nodes = 32
device = "A100-80GB"
nics = 2
nic_gbit_s = 100
"""


def _read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return load_cluster(path)


def test_a_device_of_the_table_is_named_and_the_rest_has_defaults(tmp_path: Path):
    cluster = _read(tmp_path, VELA)
    assert cluster.device == DEVICES["A100-80GB"]
    assert (cluster.num_devices, cluster.transport) == (256, "tcp")


def test_what_is_written_is_read_back_equal(tmp_path: Path):
    named = _read(tmp_path, VELA)
    own = Cluster(
        nodes=2, devices_per_node=1, device=DEVICES["CPU"], nic_gbit_s=0.5, usable_gbit_s=0.47, latency_us=200
    )
    for cluster in (named, own):
        write(cluster, tmp_path / "written.toml")
        assert load_cluster(tmp_path / "written.toml") == cluster


def test_a_device_that_is_measured_stands_in_the_file_with_all_its_figures(tmp_path: Path):
    text = (
        'nodes = 2\ndevices_per_node = 1\n[device]\nname = "this machine"\narchitecture = "cpu"\n'
        "memory_gib = 8\nmemory_gb_s = 12\nbfloat16_tflops = 0.1\nfloat32_tflops = 0.2\ncopy_gb_s = 1.5\n"
    )
    cluster = _read(tmp_path, text)
    write(cluster, tmp_path / "written.toml")
    assert load_cluster(tmp_path / "written.toml").device.copy_gb_s == 1.5


def test_fast_networks_lose_to_tcp_what_ibm_measured_and_slow_ones_nothing_much():
    fast = Cluster(device=DEVICES["A100-80GB"], nics=2, nic_gbit_s=100)
    assert fast.node_bytes_s * 8 == pytest.approx(120e9)
    slow = Cluster(device=DEVICES["A100-80GB"], nics=1, nic_gbit_s=1)
    assert slow.node_bytes_s * 8 == pytest.approx(0.95e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (VELA.replace("A100-80GB", "A100-80"), r"Unknown device \(got 'A100-80'\). Did you mean 'A100-80GB'"),
        (VELA + "nicks = 2\n", "Unknown key nicks. Did you mean 'nics'"),
        (VELA.replace("32", "0"), r"nodes must be 1 or more \(got 0\)"),
        (VELA + 'transport = "infiniband"\n', "transport has no such choice"),
        ("nodes = 2\n", "Missing key device"),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_do(tmp_path: Path, text: str, said: str):
    with pytest.raises(ConfigError, match=said) as refused:
        _read(tmp_path, text)
    assert str(tmp_path / "cluster.toml") in refused.value.__notes__[0]


def test_a_file_that_is_not_there_says_where_one_comes_from(tmp_path: Path):
    with pytest.raises(UsageError, match="penstock doctor"):
        load_cluster(tmp_path / "cluster.toml")
