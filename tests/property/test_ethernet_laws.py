"""The promises of what schedules communication: bytes under way, bytes kept, and the same order always."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.parallel.ethernet.async_collectives import pieces
from penstock.parallel.ethernet.gather_plan import (
    Ledger,
    ResidentUnits,
    UnitBytes,
    ahead,
    choose,
    sent_bytes,
    staying,
    window_of,
)

SIZES = st.lists(st.integers(0, 100), min_size=1, max_size=20)
UNITS = st.lists(
    st.builds(
        UnitBytes, parameters=st.integers(1, 50), gradients=st.integers(1, 100), gathers=st.integers(1, 2)
    ),
    max_size=12,
)


@given(SIZES, st.integers(0, 300))
def test_never_more_than_the_window_is_under_way(sizes, asked):
    """Walk through a pass as FSDP2 does: a unit is begun if it was not, waited for, then others begin."""
    window, ledger = window_of(sizes, asked=asked), Ledger()
    begun: list[int] = []
    for unit, later in enumerate(ahead(sizes, window)):
        for wanted in [unit, *later]:
            if wanted == unit and sizes[unit] and unit not in begun:
                begun.append(unit)
                ledger.begin(sizes[unit])
            if wanted == unit:
                ledger.end(sizes[unit])
            elif wanted not in begun:
                begun.append(wanted)
                ledger.begin(sizes[wanted])
    assert ledger.now == 0
    assert ledger.most <= window
    assert begun == [unit for unit, size in enumerate(sizes) if size], "each once, in the order of use"


@given(SIZES, st.integers(0, 300))
def test_what_stays_at_a_turn_takes_its_room_from_the_window(sizes, asked):
    """Walk back from the end of a pass: what waits from before and what is under way fit together."""
    window = window_of(sizes, asked=asked)
    there = {len(sizes) - 1 - unit for unit in staying(sizes, window)}
    back = sizes[::-1]
    for unit, later in enumerate(ahead(back, window, there=there)):
        waiting = [other for other in there if other > unit]
        assert sum(back[other] for other in {*waiting, *later}) <= window
        assert not there & set(later), "what is there is not gathered again"
        following = [other for other in range(unit + 1, len(back)) if back[other] and other not in there]
        if not waiting:
            assert later[:1] == following[:1], "and the next is always on its way"


@given(SIZES, st.integers(1, 300))
def test_the_next_unit_is_always_on_its_way(sizes, asked):
    for unit, later in enumerate(ahead(sizes, window_of(sizes, asked=asked))):
        following = [other for other in range(unit + 1, len(sizes)) if sizes[other]]
        assert later[:1] == following[:1]


@given(UNITS, st.integers(0, 500), st.integers(1, 8))
def test_what_is_kept_fits_its_budget_and_more_of_it_never_sends_more(units, budget, num_micro_batches):
    kept = choose(units, budget=budget, num_micro_batches=num_micro_batches)
    parameters = sum(units[i].parameters for i in kept.parameters)
    assert parameters + sum(units[i].gradients for i in kept.gradients) <= budget

    def sent(some: ResidentUnits) -> int:
        return sent_bytes(units, some, num_micro_batches=num_micro_batches, num_ranks=2)

    everything = choose(units, budget=float("inf"), num_micro_batches=num_micro_batches)
    assert sent(everything) <= sent(kept) <= sent(ResidentUnits())
    whole = sum(unit.parameters + unit.gradients for unit in units)
    assert sent(everything) == whole // 2


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(1, 500))
def test_pieces_of_a_collective_are_all_of_it_in_order(size, operations, least):
    cuts = pieces(size, operations=operations, least=least)
    assert [number for cut in cuts for number in range(cut.start, cut.stop)] == list(range(size))
    assert len(cuts) <= operations
    assert all(cut.stop - cut.start >= min(least, size) for cut in cuts[:-1])
