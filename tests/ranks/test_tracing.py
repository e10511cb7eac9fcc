"""What ranks that train write down of single steps: traces, memory, traffic, time blocked on each other."""

import gzip
import json
from functools import partial

import pytest
import torch
from tests.rank_batches import RankBatches

from penstock.obs.meter import PHASES, Phases, StepMeter
from penstock.parallel.flight_recorder import TrafficMeter
from penstock.parallel.sharding.fsdp_waits import count_blocked
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.train.loop import train
from penstock.train.monitors.step_monitors import StepMonitors
from penstock.train.monitors.tracing import Windows
from penstock.train.recipe.config import MeasureConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

_OF_SUMS = 250  # bytes of the step's own counts, losses and norms


def recipe_of(folder, *, model=None, rows=None, steps=3, **sections):
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, 64, (30,), generator=generator).tolist() for _ in range(60)]
    corpus = write_corpus(folder / "corpus", documents, vocab_size=64)
    shape = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    data = {"corpora": {"c": {"path": str(corpus)}}, "sequence_length": 16, "global_batch_size": 4}
    return build_recipe(
        {
            "run": {"dir": str(folder / "run"), "steps": steps},
            "model": shape | (model or {}),
            "data": data | {"micro_batch_size": rows},
            "compute": "float32",
            **sections,
        }
    )


def trained(recipe, folder, config, world):
    """Train; return the records, and the bytes of all parameters and of those in blocks."""
    state = open_state(recipe, world)
    blocked = count_blocked(state.model, num_shards=state.mesh.num_shards)
    meter = StepMeter(flops_per_token=lambda _: 1, peak_flops=1, phases=Phases(blocked_s=blocked))
    records, pipeline = [], state.pipeline
    sent = (lambda: 0) if pipeline is None else lambda: pipeline.sent_bytes
    with Windows(config, folder, rank=world.ranks.rank, device=world.device) as windows:
        state.watch = StepMonitors(windows=windows, traffic=TrafficMeter(state.mesh, sent_by_stages=sent))
        train(
            state,
            recipe,
            world,
            meter=meter,
            stop_requested=lambda: False,
            sinks=[records.append],
            on_batch=lambda *_: None,
        )
    records.append({"blocked_s": blocked()})
    sizes = {name: 4 * p.numel() for name, p in state.model.named_parameters()}
    in_blocks = sum(size for name, size in sizes.items() if name.startswith("layers."))
    return records, sum(sizes.values()), in_blocks


OF_SHARDS = [(*axes, overlap) for axes in ((4, 1), (2, 2), (1, 2)) for overlap in (True, False)]
"""Shards, copies, and whether what they send overlaps the computation."""
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
BLOCKING = [{}, {"shard": 1, "replicate": 2}, {"tensor": 2}, {"context": 2}, {"pipeline": 2}]
CASES = {
    **{
        f"{(shard, replicate, overlap)}": (
            shard * replicate,
            {"parallel": {"shard": shard, "replicate": replicate}, "ethernet": {"overlap": overlap}},
        )
        for shard, replicate, overlap in OF_SHARDS
    },
    "rows": (2, {"parallel": {"context": 2}}),
    "heads": (4, {"parallel": {"tensor": 4}, "model": FOUR_HEADS}),
    "shared heads": (4, {"parallel": {"tensor": 4}, "model": FOUR_HEADS | {"num_key_value_heads": 2}}),
    **{
        f"stages, {tied}": (
            2,
            {
                "model": {"num_hidden_layers": 2, "tie_word_embeddings": tied},
                "rows": 1,
                "parallel": {"pipeline": 2},
            },
        )
        for tied in (False, True)
    },
    **{
        f"blocking, {parallel}": (2, {"model": {"num_hidden_layers": 2}, "rows": 2, "parallel": parallel})
        for parallel in BLOCKING
    },
}


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """What `trained` returns on each rank of a case."""
    where = tmp_path_factory.mktemp("cases")
    recipes = {
        name: recipe_of(where / str(number), **sections)
        for number, (name, (_, sections)) in enumerate(CASES.items())
    }
    ranks = {name: case[0] for name, case in CASES.items()}
    return RankBatches(ranks, lambda name, world: trained(recipes[name], where, MeasureConfig(), world))


@pytest.mark.parametrize(("shard", "replicate", "overlap"), OF_SHARDS)
def test_the_bytes_of_a_step_are_those_of_its_gathers_and_reductions(batches, shard, replicate, overlap):
    for records, whole, in_blocks in batches.of(f"{(shard, replicate, overlap)}"):
        (event,) = (record for record in records if record.get("event") == "traffic")
        assert event["step"] == 2
        sent = event["sent_bytes"]
        # Gathered for the forward, blocks again for the backward; gloo reduces for all, at twice the price.
        # Overlapped, the one block stays for its backward, and reductions are exchanges.
        per_shard = (2 * whole if overlap else 3 * whole + in_blocks) * (shard - 1) / shard
        per_copy = 2 * whole / shard * (replicate - 1) / replicate
        for axis, expected in (("shard", per_shard), ("replicate", per_copy)):
            assert expected <= sent.get(axis, 0) <= expected + _OF_SUMS
        assert sent.get("all", 0) <= _OF_SUMS


def test_what_ranks_that_share_rows_send_each_other_counts_for_their_axis(batches):
    for records, *_ in batches.of("rows"):
        (sent,) = (record["sent_bytes"] for record in records if record.get("event") == "traffic")
        keys_and_values = 4 * 2 * 8 * 4 * 16  # float32, both of one head, for the tokens of the step
        assert sent["context"] >= 2 * keys_and_values // 2, "half of them, there and back"
        assert sent.get("all", 0) <= _OF_SUMS


def test_what_ranks_that_share_a_head_send_each_other_counts_for_the_axis_that_they_are_on(batches):
    for (records, *_), (without, *_) in zip(batches.of("shared heads"), batches.of("heads"), strict=True):
        sent, before = (
            next(record["sent_bytes"] for record in run if record.get("event") == "traffic")
            for run in (records, without)
        )
        part = 4 * 4 * 16 * 8 // 2  # float32, half of the head's key or value, for the tokens of the step
        back = 2 * part  # as gloo reduces for all
        assert sent["tensor"] - before["tensor"] == 2 * (part + back), "of keys and of values"
        assert sent.get("all", 0) <= _OF_SUMS


@pytest.mark.parametrize("tied", [False, True])
def test_what_stages_send_each_other_counts_for_the_pipeline(batches, tied):
    for records, *_ in batches.of(f"stages, {tied}"):
        (sent,) = (record["sent_bytes"] for record in records if record.get("event") == "traffic")
        hidden, matrix = 4 * 16 * 16 * 4, 4 * 64 * 16  # float32, of the tokens of the step, of the vocabulary
        expected = hidden + (matrix if tied else 0)  # one rank sends them, the other their gradients
        assert expected <= sent["pipeline"] <= expected + _OF_SUMS


@pytest.mark.parametrize("parallel", BLOCKING, ids=str)
def test_time_blocked_on_the_others_is_communication(batches, parallel):
    (records, *_), _ = batches.of(f"blocking, {parallel}")
    (blocked_s,) = (record["blocked_s"] for record in records if "blocked_s" in record)
    assert blocked_s > 0, "the step's own sums are not in it"
    steps = [record for record in records if "loss" in record]
    assert len(steps) == 3
    for step in steps:
        shares = [step[f"{phase}_share"] for phase in PHASES]
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) <= 1 + 1e-6
        assert step["communication_share"] > 0
        assert step["backward_share"] > 0


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """Events by the name of their file, of a run whose last window outlasts it."""
    folder = tmp_path_factory.mktemp("traced")
    recipe = recipe_of(folder, steps=5)
    config = MeasureConfig(trace_steps="2:4", memory_steps="5:9")
    on_ranks(partial(trained, recipe, folder, config), ranks=2)
    return {
        path.name: json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        for path in (folder / "traces").iterdir()
    }


def test_every_rank_writes_the_steps_that_were_asked_for(events):
    assert sorted(events) == [
        f"{kind}-rank-0000{rank}.json.gz"
        for kind in ("memory-steps-5-to-5", "trace-steps-2-to-3")
        for rank in (0, 1)
    ]


def test_a_trace_holds_the_operations_of_its_steps_and_no_others(events):
    names = [event.get("name") for event in events["trace-steps-2-to-3-rank-00000.json.gz"]]
    assert sum(str(name).startswith("Optimizer.step#") for name in names) == 2
    assert any("gather" in str(name) for name in names)
    assert "[memory]" not in names


def test_a_memory_record_holds_allocations_with_the_bytes_in_use(events):
    found = [e for e in events["memory-steps-5-to-5-rank-00001.json.gz"] if e.get("name") == "[memory]"]
    assert found
    assert all("Total Allocated" in event["args"] for event in found)
