"""Metrics by which gateways choose a server: as the Gateway API inference extension names them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.stats import EngineCounters, Stats
from penstock.serve.metrics import Metrics

STATS = Stats(
    waiting=3,
    running=2,
    num_blocks=80,
    used_blocks=20,
    preemptions=0,
    prefix_asked=0,
    prefix_found=0,
    counts=EngineCounters(),
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:num_requests_waiting", 3.0),  # TotalQueuedRequests
        ("vllm:num_requests_running", 2.0),
        ("vllm:kv_cache_usage_perc", 0.25),  # KVCacheUtilization, a share of one in spite of its name
    ],
)
def test_gauges_of_the_model_server_protocol_have_its_names_and_units(name, value):
    page = Metrics(lambda: STATS).text().decode()
    (family,) = [found for found in text_string_to_metric_families(page) if found.name == name]
    assert (family.type, [sample.value for sample in family.samples]) == ("gauge", [value])
