"""The laws of dealing a step's rows to ranks and micro-batches, for any corpora, lanes and costs."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import Loader
from penstock.data.reader import deal, homes_of, in_micro_batches, is_home
from penstock.testing.corpora import numbered_corpus
from tests.examples import examples

LIMIT = 1.08


@st.composite
def steps(draw, most_ranks=24, most_rows=12):
    """Ranks, and the corpora, lanes, numbers of lanes and costs of the rows of a step."""
    world_size, local = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = world_size * local
    share = rng.dirichlet(np.full(draw(st.integers(1, 40)), 0.5))
    corpora = rng.choice(len(share), size=size, p=share)
    num_lanes = rng.integers(1, 70, len(share))[corpora]
    costs = (rng.lognormal(0, draw(st.sampled_from([0.0, 0.5, 2.0])), size) * 1e6).astype(np.int64)
    return world_size, corpora, rng.integers(0, num_lanes), num_lanes, costs


def dealt(step):
    world_size, corpora, lanes, num_lanes, costs = step
    homes = homes_of(corpora, lanes, num_lanes, world_size=world_size)
    return homes, deal(corpora, homes, costs, world_size=world_size)


def within_one_row(corpora, chosen, of):
    """Whether some rows hold each corpus in its share of all rows, rounded down or up."""
    share = np.bincount(corpora) * chosen.size / of
    held = np.bincount(corpora[chosen], minlength=len(share))
    return bool(((held >= np.floor(share)) & (held <= np.ceil(share))).all())


@given(steps())
@examples(300)
def test_every_rank_gets_as_many_rows_and_its_share_of_every_corpus(step):
    world_size, corpora = step[0], step[1]
    _, ranks = dealt(step)
    assert np.bincount(ranks, minlength=world_size).tolist() == [len(ranks) // world_size] * world_size
    for rank in range(world_size):
        assert within_one_row(corpora, np.flatnonzero(ranks == rank), of=len(ranks))


@given(steps(), st.data())
@examples(300)
def test_every_micro_batch_holds_its_share_of_every_corpus(step, data):
    world_size, corpora, _, _, costs = step
    _, ranks = dealt(step)
    local = len(ranks) // world_size
    rows = data.draw(st.sampled_from([rows for rows in range(1, local + 1) if local % rows == 0]))
    for rank in range(world_size):
        mine = np.flatnonzero(ranks == rank)
        order = mine[in_micro_batches(corpora[mine], costs[mine], rows=rows)]
        assert sorted(order.tolist()) == mine.tolist()
        for first in range(0, local, rows):
            assert within_one_row(corpora, order[first : first + rows], of=len(ranks))


@given(steps(most_ranks=8, most_rows=6))
@examples(200)
def test_the_busiest_rank_is_within_the_limit_or_no_swap_in_its_corpora_relieves_it(step):
    world_size, corpora, _, _, costs = step
    _, ranks = dealt(step)
    loads = np.bincount(ranks, weights=costs, minlength=world_size)
    busiest = int(loads.argmax())
    if loads[busiest] <= LIMIT * loads.mean() or (loads == loads[busiest]).sum() > 1:
        return
    for one in np.flatnonzero(ranks == busiest).tolist():
        for other in np.flatnonzero((ranks != busiest) & (corpora == corpora[one])).tolist():
            gain = costs[one] - costs[other]
            assert max(loads[busiest] - gain, loads[ranks[other]] + gain) >= loads[busiest]


@given(steps())
@examples(100)
def test_dealing_is_a_function_and_the_home_of_a_row_is_a_home_of_its_rank(step):
    world_size, corpora, lanes, num_lanes, _ = step
    homes, ranks = dealt(step)
    again = dealt(step)[1]
    assert (again == ranks).all()
    for rank in range(world_size):
        of = homes == rank
        assert is_home(corpora[of], lanes[of], num_lanes[of], rank=rank, world_size=world_size).all()


@st.composite
def layouts(draw):
    """Ranks and micro-batches of one batch size, as a run has them one after the other."""
    return draw(
        st.lists(
            st.sampled_from([(1, 24), (1, 6), (2, 3), (3, 8), (4, 2), (6, 4), (12, 1)]),
            min_size=2,
            max_size=4,
        )
    )


@given(
    layouts(), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from(["best_fit", "concat"])
)
@examples(40)
def test_a_run_that_changes_ranks_and_micro_batches_serves_the_same_step_evenly(layouts, weights, packing):
    rng = np.random.default_rng(sum(weights))
    with tempfile.TemporaryDirectory() as folder:
        corpora = {
            f"c{index}": numbered_corpus(
                Path(folder, str(index)), rng.integers(1, 9 * 4**index, 400 // 2**index).tolist()
            )
            for index in range(len(weights))
        }
        state = None
        for ranks, rows in layouts:
            made = [
                Loader(
                    corpora, weights=dict(zip(corpora, weights, strict=True)), sequence_length=16,
                    global_batch_size=24, rank=rank, world_size=ranks, micro_batch_size=rows,
                    packing=packing, fields=("input_ids", "cu_seqlens"), num_workers=0, deliver="numpy",
                )
                for rank in range(ranks)
            ]  # fmt: skip
            served = {}
            for loader in made:
                if state is not None:
                    loader.load_state_dict(state)
                batches = iter(loader)
                for step in range(loader.step, loader.step + 3):
                    served.setdefault(step, []).append(next(batches)["sample_ids"])
            state = made[0].state_dict()
            assert all(loader.state_dict() == state for loader in made)
            for step, of_ranks in served.items():
                ids = np.concatenate(of_ranks)
                assert sorted(ids.tolist()) == list(range(24 * step, 24 * step + 24))
                names = made[0].corpora_of(ids)
                whose = np.unique(names, return_inverse=True)[1]
                for first in range(0, 24, rows):
                    assert within_one_row(whose, np.arange(first, first + rows), of=24)
                for first in range(0, 24, 24 // ranks):
                    assert within_one_row(whose, np.arange(first, first + 24 // ranks), of=24)
