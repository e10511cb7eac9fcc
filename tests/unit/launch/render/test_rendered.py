"""What a launch can cost, and what a run on this machine looks like."""

from penstock.launch.render.local import local_settings, render
from penstock.launch.render.rendered import ceiling
from penstock.launch.spec import node_range
from tests.unit.launch.test_spec import make_spec


def test_a_ceiling_counts_devices_and_money():
    lines = ceiling(nodes=4, devices_per_node=8, seconds=3600, price_per_node_hour=10.5)
    assert lines == [
        "at most 32 device-hours a start (4 nodes x 8 devices x 1 h)",
        "at most 42.00 a start in the cluster file's currency",
    ]


def test_a_ceiling_counts_the_starts_that_a_run_asks_for_itself():
    costs = {"nodes": 2, "devices_per_node": 8, "seconds": 1800, "max_requeues": 100}
    assert ceiling(**costs, price_per_node_hour=10)[2:] == [
        "at most 101 starts (--max-requeues 100): 808 device-hours, 1010.00"
    ]
    assert ceiling(**costs, price_per_node_hour=0)[1:] == [
        "at most 101 starts (--max-requeues 100): 808 device-hours"
    ]


def test_without_a_time_limit_there_is_no_ceiling():
    (line,) = ceiling(nodes=4, devices_per_node=8, seconds=0, price_per_node_hour=10.5)
    assert "no ceiling" in line


def test_nodes_on_one_machine_share_its_cores():
    spec = make_spec(nodes=node_range("1:3"), processes=2)
    values = {setting.name: setting.value for setting in local_settings(spec, cores=13)}
    assert values == {"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "lo"}
    given = make_spec(environment=(("OMP_NUM_THREADS", "5"), ("GLOO_SOCKET_IFNAME", "eth0")))
    assert local_settings(given, cores=13) == []


def test_each_process_and_each_setting_is_shown():
    rendered = render(make_spec(nodes=node_range("2"), processes=3), cores=6)
    assert len(rendered.commands) == 6
    assert all(setting.reason for setting in rendered.settings)
    assert "$ /opt/penstock/bin/python -m penstock train" in rendered.as_text()
