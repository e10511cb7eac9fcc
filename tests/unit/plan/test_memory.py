"""Laws of the planned memory: what must not cost more, and where a step is fullest."""

from dataclasses import replace

import pytest

from penstock.models.decoder.config import DecoderConfig
from penstock.parallel.layout import RankLayout
from penstock.plan.job import TrainingStep
from penstock.plan.memory import BytesPerParameter, moments, peak

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
}


def job(**changes):
    fields = {"layout": RankLayout(shard=8), "sequence_length": 512, "num_micro_batches": 4, **changes}
    return TrainingStep(model=DecoderConfig(**SHAPE, vocab_size=4096), **fields)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"layout": RankLayout(shard=16)}, {"layout": RankLayout(shard=8)}),
        ({"layout": RankLayout(shard=4, tensor=2)}, {"layout": RankLayout(shard=4)}),
        ({"modes": "full"}, {"modes": "operators"}),
        ({"modes": "operators"}, {"modes": "keep"}),
        ({"micro_batch_size": 1}, {"micro_batch_size": 2}),
        ({"compute": "bfloat16"}, {"compute": "float32"}),
        ({}, {"reshard_after_forward": False}),
    ],
)
def test_what_shares_or_computes_more_takes_less(less, more):
    assert peak(job(**less)).total < peak(job(**more)).total


def test_a_first_stage_holds_more_micro_batches_than_a_last_one():
    staged = job(layout=RankLayout(pipeline=4), num_micro_batches=8)
    first, last = (
        max(m.activations for m in moments(staged, BytesPerParameter(), place)) for place in (0, 3)
    )
    assert first > 3 * last


def test_a_large_vocabulary_is_fullest_at_the_loss_and_a_wide_model_in_its_backward():
    model = DecoderConfig(**SHAPE, vocab_size=128_000)
    assert peak(replace(job(), model=model)).moment in ("loss", "reduction")
    small = DecoderConfig(**SHAPE, vocab_size=256)
    assert peak(replace(job(micro_batch_size=4, modes="full"), model=small)).moment == "backward"


def test_blocks_stay_at_the_turns_of_a_pass():
    """Two at the loss, for the backward pass; two when the root is reduced, for the next micro-batch."""
    by_moment = [
        {m.moment: m.gathered for m in moments(job(turning=turning), BytesPerParameter())}
        for turning in (0, 1)
    ]
    extra = {moment: by_moment[1][moment] - size for moment, size in by_moment[0].items()}
    both = 2 * job().compute_bytes * job().largest_block
    assert extra == {"loss": both, "backward": 0, "reduction": both, "update": 0}


def test_without_a_window_all_gradients_of_a_step_wait():
    """Sent and received, on CPUs."""
    peaks = [
        peak(job(window_mib=float("inf"), num_micro_batches=m, on_cpu=True, compute="float32")).total
        for m in (2, 3)
    ]
    assert peaks[1] - peaks[0] == pytest.approx(2 * 4 * job().model.num_parameters, rel=0.01)


def test_parts_add_up_at_every_moment():
    for moment in moments(job(), BytesPerParameter()):
        assert moment.total == sum(moment.parts.values())
        assert min(moment.parts.values()) >= 0


def test_an_optimizer_that_keeps_less_saves_what_it_keeps_less():
    less = BytesPerParameter(optimizer=2.0625, optimizer_outside=2.0625)
    saved = peak(job()).total - peak(job(), less).total
    assert saved == pytest.approx((8 - 2.0625) * job().model.num_parameters / 8, rel=0.001)
