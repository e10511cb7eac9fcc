"""Boxes and shares of any tensor on any mesh: parts cover it once, and all is written once, evenly."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.write_plan import SPLIT_BYTES, Held, holders, share_of
from penstock.core.boxes import (
    AxisShard,
    Box,
    cut_box,
    intersection,
    label,
    overlaps,
    parse_label,
    span,
    split,
    strides,
    whole,
)

shapes = st.lists(st.integers(1, 12), min_size=1, max_size=3)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], list[list[AxisShard]]]:
    """A shape, and for each rank of a mesh of one to three axes its cuts; some axes repeat the tensor."""
    shape = draw(shapes)
    axes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = [draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in axes]
    strided = [draw(st.booleans()) for _ in axes]
    ranks = itertools.product(*map(range, axes))
    return shape, [
        [
            AxisShard(dim, parts, index, strided=late)
            for dim, parts, index, late in zip(dims, axes, place, strided, strict=True)
            if dim is not None
        ]
        for place in ranks
    ]


def count(shape: list[int], boxes: list[Box]) -> np.ndarray:
    """How often each element lies in a box."""
    found = np.zeros(shape, int)
    for box in boxes:
        found[box.within(whole(shape))] += 1
    return found


@given(meshes())
def test_the_shards_of_any_mesh_cover_a_tensor_equally_often(
    mesh: tuple[list[int], list[list[AxisShard]]],
) -> None:
    shape, ranks = mesh
    held = [box for box in (cut_box(shape, cuts) for cuts in ranks) if box.num_elements]
    assert (count(shape, sorted(set(held))) == 1).all()


@given(meshes(), st.integers(1, 8))
def test_every_element_of_any_mesh_is_written_once(
    mesh: tuple[list[int], list[list[AxisShard]]], item_bytes: int
) -> None:
    shape, ranks = mesh
    item_bytes *= SPLIT_BYTES // prod(shape) + 1  # some copies are split and some are not
    held = [Held("w", cut_box(shape, cuts), item_bytes) for cuts in ranks]
    keys = [[each.key] for each in held]
    parts = [
        part
        for rank, each in enumerate(held)
        for _, part in share_of(rank, {each: holders([each.key], keys)[0]})
    ]
    assert (count(shape, parts) == 1).all()


def test_copies_are_shared_out_evenly_whatever_their_sizes() -> None:
    rng = np.random.default_rng(0)
    tensors = {
        Held(f"w{n}", whole([int(rows), 64]), 4): (0, 1, 2, 3)
        for n, rows in enumerate(rng.integers(1, 3_000, 40))
    }
    written = [sum(part.num_elements * 4 for _, part in share_of(rank, tensors)) for rank in range(4)]
    assert sum(written) == sum(each.num_bytes for each in tensors)
    assert max(written) - min(written) < 2 * SPLIT_BYTES


def test_boxes_of_another_rank_are_not_copies() -> None:
    first, second = Held("w", Box((0,), (4,)), 4), Held("w", Box((4,), (4,)), 4)
    assert first.key != second.key
    assert first.key != Held("v", first.box, 4).key
    assert holders([first.key], [[first.key], [second.key], [first.key]]) == [(0, 2)]


@given(shapes, st.data())
def test_a_span_holds_what_a_part_of_a_stored_box_has(shape: list[int], data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, 5)) for _ in shape)
    stored = Box(offsets, tuple(shape))
    wanted = Box(tuple(data.draw(st.integers(0, 8)) for _ in shape), tuple(shape))
    shared = intersection(wanted, stored)
    if shared is None:
        return
    values = np.arange(prod(shape)).reshape(shape)
    run = values.reshape(-1)[span(shared, stored).start : span(shared, stored).stop]
    steps = [step * run.itemsize for step in strides(shape)]
    found = np.lib.stride_tricks.as_strided(run, shared.sizes, steps)
    assert (found == values[shared.within(stored)]).all()


@given(shapes, st.integers(1, 9))
def test_a_split_loses_nothing_and_is_even(shape: list[int], parts: int) -> None:
    found = split(whole(shape), parts)
    assert (count(shape, found) == 1).all()
    assert 1 <= len(found) <= parts


@given(shapes, st.data())
def test_a_stored_name_says_which_part_it_is(shape: list[int], data: st.DataObject) -> None:
    box = Box(tuple(data.draw(st.integers(0, 99)) for _ in shape), tuple(shape))
    assert parse_label(label("a.b_c", box, [1000] * len(shape)), shape) == ("a.b_c", box)


def test_a_scalar_is_one_element_everywhere() -> None:
    scalar = whole(())
    assert scalar.num_elements == 1
    assert span(scalar, scalar) == range(1)
    assert intersection(scalar, scalar) == scalar
    assert list(overlaps(scalar, [scalar])) == [(0, scalar)]
    assert split(scalar, 4) == [scalar]
    assert label("step", scalar, ()) == "step"


def test_a_stored_name_of_other_dims_is_refused() -> None:
    with pytest.raises(ValueError, match="'w@1,2' has 1 dims"):
        parse_label("w@1,2", [4])
