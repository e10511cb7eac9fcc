"""A timeline as an SVG that parses, and as a trace in the format that Perfetto reads."""

import json
from xml.etree import ElementTree as ET

import pytest

from penstock.devices.figures import DEVICES
from penstock.models.decoder.config import DecoderConfig
from penstock.parallel.layout import RankLayout
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.predict import timeline_of
from penstock.plan.report import svg, trace


@pytest.fixture
def events():
    model = DecoderConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    job = TrainingStep(model=model, layout=RankLayout(shard=16), sequence_length=2048, num_micro_batches=2)
    cluster = Cluster(nodes=2, devices_per_node=8, device=DEVICES["A100-40GB"])
    return timeline_of(job, cluster, record=True).events


def test_every_event_is_a_bar_with_words(events):
    root = ET.fromstring(svg(events, title="a < b"))
    bars = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if len(rect)]
    assert len(bars) == len(events)
    assert all(float(bar.get("width")) > 0 for bar in bars)
    words = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "a < b" in words
    assert any("block 5, micro-batch 1" in text for text in words)


def test_a_trace_has_complete_events_that_do_not_overlap_on_a_stream(events):
    read = json.loads(json.dumps(trace(events)))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in read if event["ph"] == "M"}
    assert list(lanes.values()) == ["compute", "gather", "reduce"]
    slices = [event for event in read if event["ph"] == "X"]
    assert len(slices) == len(events)
    for lane in lanes:
        ends = 0.0
        for one in sorted((s for s in slices if s["tid"] == lane), key=lambda s: s["ts"]):
            assert one["ts"] >= ends - 1e-3, one
            ends = one["ts"] + one["dur"]
    assert {one["args"]["link"] for one in slices} >= {"none", "network"}


def test_nothing_to_draw_is_an_empty_timeline():
    ET.fromstring(svg([], title="nothing"))
    assert len(trace([])["traceEvents"]) == 3
