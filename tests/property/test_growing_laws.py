"""Laws of corpora that grow, for any parts: the order of the finished corpus, each token once a pass."""

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import clock
from penstock.data import Loader
from penstock.data.prepare.plan import Growth
from tests.examples import examples
from tests.growing import finish, grow, streamed_corpus

PART = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum)


def loader(folder: Path, **options: object) -> Loader:
    given = {"global_batch_size": 1, "deliver": "numpy", "num_workers": 0, **options}
    return Loader({"web": folder}, **given)  # type: ignore[arg-type]


@examples(20)
@given(
    parts=st.lists(PART, min_size=1, max_size=5),
    length=st.integers(2, 24),
    packing=st.sampled_from(["concat", "best_fit"]),
    share=st.floats(0, 1),
    later=st.integers(2, 24),
)
def test_a_growing_corpus_gives_what_the_finished_one_gives(
    parts: list[list[int]], length: int, packing: str, share: float, later: int
) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        whole, growing = (streamed_corpus(Path(place) / name, parts[0]) for name in ("whole", "growing"))
        for part in parts[1:]:
            grow(whole, part)
        finish(whole)
        left = iter([*(partial(grow, growing, part) for part in parts[1:]), partial(finish, growing)])
        patch.setattr(clock, "sleep", lambda _seconds: next(left)())

        complete = loader(whole, sequence_length=length, packing=packing)
        rows = complete.samples_per_epoch["web"]
        tokens = np.concatenate([complete.batch_at(step)["input_ids"] for step in range(rows)])
        seen = Counter(token for token in tokens.ravel().tolist() if token)
        assert seen == Counter(range(1, sum(map(sum, parts)) + 1)), "each token once in the first pass"

        stop = round(share * 2 * rows)
        first = loader(growing, sequence_length=length, packing=packing)
        batches, complete_batches = iter(first), iter(complete)
        for _ in range(stop):
            assert next(batches)["input_ids"].tolist() == next(complete_batches)["input_ids"].tolist()
        assert first.state_dict() == complete.state_dict(), "whatever is there by now"
        resumed = loader(growing, sequence_length=length, packing=packing)
        resumed.load_state_dict(first.state_dict())
        for each in (resumed, complete):
            each.set_sequence_length(later)
        for step in range(stop, stop + 2 * rows):
            found, wanted = resumed.batch_at(step), complete.batch_at(step)
            assert found["input_ids"].tolist() == wanted["input_ids"].tolist()


@given(
    first=st.integers(1, 50),
    part=st.integers(1, 500),
    shard=st.integers(1, 200),
    shards=st.integers(0, 60),
    done=st.booleans(),
)
def test_parts_rise_are_a_prefix_of_later_ones_and_end_with_the_corpus(
    first: int, part: int, shard: int, shards: int, done: bool
) -> None:
    growth = Growth(first_part_tokens=first, part_tokens=part, shard_tokens=shard)
    ends = growth.part_ends(shards, done=done)
    assert list(ends) == sorted(set(ends))
    assert all(0 < end <= shards for end in ends)
    assert not done or not shards or ends[-1] == shards
    later = growth.part_ends(shards + 7, done=False)
    whole = growth.part_ends(shards, done=False)
    assert later[: len(whole)] == whole
    sizes = [growth.shard_limit(number) for number in range(shards)]
    assert sizes == sorted(sizes)
    assert all(1 <= size <= min(part, shard) for size in sizes)
