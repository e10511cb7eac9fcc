"""What a resume makes of a schedule, of corpora that came and went, and of what was told before it."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, CorpusError
from penstock.data import Loader
from penstock.data.schedule.change_log import Change
from tests.growing import grow
from tests.loaders import resumed, run, tokens

Make = Callable[..., Loader]


PLAN = [
    Change(step=6, weights={"web": 1, "code": 9}, global_batch_size=8),
    Change(step=9, sequence_length=24),
]


@pytest.mark.parametrize("step", range(12))
def test_a_schedule_is_kept_wherever_the_run_is_resumed(mix: Make, step: int) -> None:
    whole = mix(schedule=PLAN)
    again = resumed(run(mix(schedule=PLAN), step), mix(schedule=PLAN))
    assert tokens(again, range(14)) == tokens(whole, range(14))


def test_what_was_told_over_a_plan_holds_after_a_resume_at_that_very_step(mix: Make) -> None:
    loader = run(mix(schedule=PLAN), 6)
    loader.set_weights({"web": 1, "code": 1})
    loader.set_global_batch_size(4)
    again = resumed(loader, mix(schedule=PLAN))
    assert (again.weights, again.global_batch_size) == ({"web": 0.5, "code": 0.5}, 4)
    assert tokens(again, range(14)) == tokens(loader, range(14))


def test_another_schedule_holds_from_the_step_of_the_resume_on(mix: Make) -> None:
    again = mix(schedule=[Change(step=3, sequence_length=24), Change(step=1)])
    again.load_state_dict(run(mix(), 3).state_dict(), on_change="apply")
    assert [len(batch[0]) for batch in tokens(again, range(2, 5))] == [8, 24, 24]


def test_a_planned_length_that_is_told_early_is_no_second_change(mix: Make) -> None:
    planned = mix(schedule=[Change(step=9, sequence_length=24)])
    told = resumed(run(planned, 4), mix(schedule=[Change(step=9, sequence_length=24)]))
    for loader in (planned, told):
        loader.set_sequence_length(24)
    again = resumed(run(told, 2), mix(schedule=[Change(step=9, sequence_length=24)]))
    assert tokens(planned, range(14)) == tokens(told, range(14)) == tokens(again, range(14))


def test_a_copy_knows_what_is_told_of_later_steps_and_what_was_added(
    mix: Make, corpora: dict[str, Path]
) -> None:
    loader = run(mix(weights={"web": 1, "code": 1}), 2)
    loader.add_corpus("math", corpora["math"], weights={"web": 1, "code": 1, "math": 2})
    loader.set_weights({"web": 0, "code": 1, "math": 1}, step=5)
    copy = pickle.loads(pickle.dumps(run(loader, 1)))
    assert (copy.step, copy.state_dict()) == (3, loader.state_dict())
    assert tokens(copy, range(8)) == tokens(loader, range(8))


def test_a_state_from_before_a_corpus_was_added_takes_it_out_again(
    mix: Make, corpora: dict[str, Path]
) -> None:
    loader = mix(weights={"web": 1, "code": 1})
    state, before = loader.state_dict(), tokens(loader, range(4))
    loader.add_corpus("math", corpora["math"], weights={"web": 1, "code": 1, "math": 2})
    loader.load_state_dict(state)
    assert list(loader.corpora) == ["web", "code"]
    assert tokens(loader, range(4)) == before


def test_a_removed_corpus_may_be_absent_and_may_come_back_where_it_stood(
    mix: Make, corpora: dict[str, Path]
) -> None:
    loader = run(mix(), 5)
    loader.remove_corpus("web")
    again = resumed(run(loader, 2), mix("code"))
    assert tokens(again, range(5, 9)) == tokens(loader, range(5, 9))
    assert again.samples_by_corpus(7) == loader.samples_by_corpus(7)
    third = resumed(again, mix("code"))
    assert third.state_dict() == again.state_dict() == loader.state_dict()
    with pytest.raises(CorpusError, match=r"'web' was removed from the run and is not open.*Name it in"):
        third.batch_at(0)
    for each in (loader, third):
        assert list(each.corpora) == list(each.weights) == ["code"]
        each.add_corpus("web", corpora["web"], weights={"web": 1, "code": 1})
    assert tokens(third, range(12)) == tokens(loader, range(12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Change(step=-1), "step of a change must be at least 0"),
        (Change(step=1, sequence_length=1), "sequence_length must be at least 2"),
        (Change(step=1, global_batch_size=0), "global_batch_size must be at least 1"),
        (Change(step=1, global_batch_size=5), "5 sequences does not divide over 2 ranks"),
        (Change(step=1, weights={"web": 1}), "'code' has no weight"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused_at_the_start(mix: Make, change: Change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mix(schedule=[change], world_size=2)


def test_a_state_from_before_a_growth_loads_and_goes_on_without_it(
    mix: Make, corpora: dict[str, Path]
) -> None:
    loader = run(mix("web"), 4)
    state, before = loader.state_dict(), tokens(loader, range(60))
    grow(corpora["web"], [25] * 4)
    again = mix("web")
    assert again.samples_per_epoch == {"web": 88}, "a new run reads the whole"
    again.load_state_dict(state)
    assert tokens(again, range(60)) == before
    again.extend_corpus("web")
    late = resumed(run(again, 1), mix("web"))
    assert late.state_dict() == again.state_dict()
    served = {token for batch in tokens(late, range(30)) for row in batch for token in row if token}
    assert served >= set(range(1, 701))
    loader.load_state_dict(late.state_dict())  # opened before the growth
    assert tokens(loader, range(30)) == tokens(late, range(30))
