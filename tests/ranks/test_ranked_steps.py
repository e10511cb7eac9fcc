"""A rank's step is one call, which computes with the other ranks what blocks do one by one."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.rank_batches import RankBatches
from tests.tiny_models import CONFIGS, save_tiny_model
from tests.unit.engine.model_runner.test_whole_steps import BLOCK_SIZE, STEPS, a_batch, in_groups

from penstock.engine.config import EngineConfig
from penstock.engine.model_runner import collectives as board_module
from penstock.engine.model_runner import native_decoder
from penstock.engine.model_runner.runner import Runner
from penstock.engine.workers.model_shard import open_part
from penstock.models.decoder.tensor_slices import TensorParallelRank
from penstock.nn.linear.packed import can_multiply
from penstock.testing.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    not can_multiply(torch.zeros(1)), reason="this CPU has no such instructions, or no compiler"
)


def save_of_neurons(neurons, family, folder):
    """Write a tiny model with feed-forward layers of another width, which ranks share."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("intermediate_size", "shared_intermediate_size"):
            if hasattr(CONFIGS[family], name):
                patch.setattr(CONFIGS[family], name, neurons)
        save_tiny_model(family, folder)


def open_rank(world, folder, weights="stored"):
    """Return this rank's part of a model, which has met the others."""
    place = TensorParallelRank(world.ranks.rank, world.ranks.world_size)
    config = EngineConfig(weights=weights, device="cpu", tensor_parallel=place.ranks)
    part, _ = open_part(folder, config, place=place)
    part.group.join(folder / f"meeting-{weights}")
    return part, part.runner(num_blocks=11 * len(part.groups), block_size=BLOCK_SIZE)


def by_modules(part):
    """The same part and pages of its own, computed block by block."""
    model, runner = part.model, part.runner(num_blocks=11 * len(part.groups), block_size=BLOCK_SIZE)
    return Runner(
        model,
        runner.cache,
        part.adapters,
        group=part.group,
        forward=lambda ids, positions, bound: model.hidden(ids, position_ids=positions, cache=bound),
    )


def compare(world, *, folder, weights, slot_bytes=board_module.SLOT_BYTES):
    """Return, for each type of the matrices, whether steps were one call, and gave the same."""
    board_module.SLOT_BYTES = native_decoder.SLOT_BYTES = slot_bytes
    found = []
    for kind in weights:
        part, runner = open_rank(world, folder, kind)
        modules = by_modules(part)
        equal = True
        # norms over the heads of all ranks are summed in another order
        error = 0.0 if part.model.config.family.qk_norm != "whole" else 1e-5 if kind == "float32" else 0.05

        def same(ours, theirs, error=error):
            return torch.equal(ours, theirs) or float((ours - theirs).norm() / theirs.norm()) < error

        for spans in STEPS:
            batch = in_groups(a_batch(spans), len(part.groups))
            ours, theirs = runner.run(batch), modules.run(batch)
            equal &= same(ours.hidden, theirs.hidden) and same(ours.logits, theirs.logits)
        for asked, vectors in (((6, 7, 16), (9,)), ((), (2,)), ((), ())):
            batch, whole = a_batch(STEPS[0], asked=asked, vectors=vectors), a_batch(STEPS[0])
            ours, theirs = (
                each.run(in_groups(step, len(part.groups)))
                for each, step in ((runner, batch), (modules, whole))
            )
            rows = [*asked, *vectors]
            equal &= same(ours.hidden[rows], theirs.hidden[rows])
            equal &= same(ours.logits, theirs.logits[list(asked)])
        equal &= same(runner.cache.pages, modules.cache.pages)
        found.append((runner._native is not None, equal))
        part.close()
    return found


OF_FOUR = "llama on four ranks"


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """What `compare` returns on two ranks, by family, and on four."""
    where = tmp_path_factory.mktemp("models")
    for family in CONFIGS:
        save_of_neurons(64, family, where / family)
    save_of_neurons(64, "llama", where / OF_FOUR)

    def work(case, world):
        weights = ("float32", "int8") if case == OF_FOUR else ("float32", "bfloat16", "int8", "int4")
        return compare(world, folder=where / case, weights=weights)

    return RankBatches(dict.fromkeys(CONFIGS, 2) | {OF_FOUR: 4}, work)


@pytest.mark.parametrize("case", [*CONFIGS, OF_FOUR])
def test_ranks_compute_in_one_call_what_they_do_block_by_block(batches, case):
    for found in batches.of(case):
        assert found == [(True, True)] * (2 if case == OF_FOUR else 4)


def test_logits_that_the_board_has_no_room_for_come_piece_by_piece(tmp_path):
    save_tiny_model("llama", tmp_path)
    room = 17 * 32 * 4  # the stream of the longest step; logits of four rows of 17
    found = on_ranks(partial(compare, folder=tmp_path, weights=["float32"], slot_bytes=room), ranks=2)
    assert found == [[(True, True)]] * 2


def test_steps_that_the_board_has_no_room_for_are_computed_block_by_block(tmp_path):
    save_tiny_model("llama", tmp_path)
    found = on_ranks(partial(compare, folder=tmp_path, weights=["float32"], slot_bytes=512), ranks=2)
    assert found == [[(True, True)]] * 2


def test_ranks_of_which_one_cannot_all_compute_block_by_block(tmp_path):
    save_of_neurons(65, "llama", tmp_path)  # a rank has 32, which bfloat16 pairs, and the other 33
    found = on_ranks(partial(compare, folder=tmp_path, weights=("float32", "bfloat16")), ranks=2)
    assert found == [[(True, True), (False, True)]] * 2


def leave(world, *, folder, after, how):
    """The second rank leaves a step after some sums of it; return what the first is told."""
    part, runner = open_rank(world, folder)
    if world.ranks.rank == 0:
        with pytest.raises(RuntimeError) as told:
            runner.run(a_batch(STEPS[0]))
        said = str(told.value)
    else:
        assert native_decoder.open_native_decoder(part.model, runner.cache, part.group) is not None
        for _ in range(after):
            part.group.sum(torch.ones(1))
        if how == "gone":
            os.close(part.group.board._file)  # as the kernel does when a process ends
        else:
            part.close()
        said = None
    dist.barrier()
    if how != "gone":
        part.close()
    return said


@pytest.mark.parametrize("after", [0, 1, 4, 5])  # of one sum of embeddings, two of each of two blocks, logits
@pytest.mark.parametrize(
    ("how", "why"), [("gone", "Rank 1 is gone"), ("closed", "The ranks' board was closed")]
)
def test_a_rank_that_leaves_in_the_middle_of_a_step_ends_it(how, why, after, tmp_path):
    save_tiny_model("llama", tmp_path)
    said, _ = on_ranks(partial(leave, folder=tmp_path, after=after, how=how), ranks=2)
    assert said == f"{why}: Connection closed by peer"


ON_THREADS = """
import sys
from pathlib import Path

import torch

from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request

def answers(ranks):
    config = EngineConfig(tensor_parallel=ranks, cache_gib=2**-8, max_context=96, device="cpu")
    engine = build_engine(Path(sys.argv[1]), config)
    for first in range(3, 24, 7):
        engine.add(Request(prompt=tuple(range(first, 3 * first)), max_tokens=24))
    found = {}
    while engine.has_work:
        for piece in engine.step():
            found.setdefault(piece.request_id, []).extend(piece.token_ids)
    engine.close()
    return list(found.values())

if __name__ == "__main__":
    alone = answers(1)
    assert answers(2) == alone
    assert torch.get_num_threads() == 2, torch.get_num_threads()
    print("equal")
"""


def test_ranks_of_several_threads_give_the_tokens_of_one(tmp_path):
    save_tiny_model("llama", tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", ON_THREADS, str(tmp_path / "model")],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr
