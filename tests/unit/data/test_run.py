"""What a loader may be told, what it refuses, and what a resume makes of a schedule."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.growing import grow

from penstock.core.errors import ConfigError, CorpusChanged, CorpusError, CorpusExhausted, UsageError
from penstock.data import Loader
from penstock.data.schedule import Change
from penstock.testing.corpora import numbered_corpus, write_corpus

Make = Callable[..., Loader]


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, Path]:
    lengths = {"web": [30] * 20, "code": [20] * 20, "math": [10] * 20}
    return {name: numbered_corpus(tmp_path / name, each) for name, each in lengths.items()}


@pytest.fixture
def make(corpora: dict[str, Path]) -> Make:
    """A function that makes a loader of two of the corpora; options over plain ones."""

    def made(*names: str, **options: Any) -> Loader:
        plain = {"sequence_length": 8, "global_batch_size": 4, "num_workers": 0, "deliver": "numpy"}
        chosen = {name: corpora[name] for name in names or ("web", "code")}
        return Loader(chosen, **{**plain, **options})

    return made


def run(loader: Loader, steps: int) -> Loader:
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    batches.close()
    return loader


def resumed(loader: Loader, other: Loader) -> Loader:
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return other


def tokens(loader: Loader, steps: range) -> list[list[list[int]]]:
    return [loader.batch_at(step)["input_ids"].tolist() for step in steps]


PLAN = [
    Change(step=6, weights={"web": 1, "code": 9}, global_batch_size=8),
    Change(step=9, sequence_length=24),
]


@pytest.mark.parametrize("step", range(12))
def test_a_schedule_is_kept_wherever_the_run_is_resumed(make: Make, step: int) -> None:
    whole = make(schedule=PLAN)
    again = resumed(run(make(schedule=PLAN), step), make(schedule=PLAN))
    assert tokens(again, range(14)) == tokens(whole, range(14))


def test_what_was_told_over_a_plan_holds_after_a_resume_at_that_very_step(make: Make) -> None:
    loader = run(make(schedule=PLAN), 6)
    loader.set_weights({"web": 1, "code": 1})
    loader.set_global_batch_size(4)
    again = resumed(loader, make(schedule=PLAN))
    assert (again.weights, again.global_batch_size) == ({"web": 0.5, "code": 0.5}, 4)
    assert tokens(again, range(14)) == tokens(loader, range(14))


def test_another_schedule_holds_from_the_step_of_the_resume_on(make: Make) -> None:
    again = resumed(run(make(), 3), make(schedule=[Change(step=3, sequence_length=24), Change(step=1)]))
    assert [len(batch[0]) for batch in tokens(again, range(2, 5))] == [8, 24, 24]


def test_a_planned_length_that_is_told_early_is_no_second_change(make: Make) -> None:
    planned = make(schedule=[Change(step=9, sequence_length=24)])
    told = resumed(run(planned, 4), make(schedule=[Change(step=9, sequence_length=24)]))
    for loader in (planned, told):
        loader.set_sequence_length(24)
    again = resumed(run(told, 2), make(schedule=[Change(step=9, sequence_length=24)]))
    assert tokens(planned, range(14)) == tokens(told, range(14)) == tokens(again, range(14))


def test_the_rows_of_an_epoch_are_those_at_the_present_length_not_a_planned_one(make: Make) -> None:
    loader = make("web", schedule=[Change(step=2, sequence_length=16)])
    assert loader.samples_per_epoch == {"web": 75}
    assert run(loader, 2).samples_per_epoch == {"web": 38}


def test_a_copy_knows_what_is_told_of_later_steps_and_what_was_added(
    make: Make, corpora: dict[str, Path]
) -> None:
    loader = run(make(weights={"web": 1, "code": 1}), 2)
    loader.add_corpus("math", corpora["math"], weights={"web": 1, "code": 1, "math": 2})
    loader.set_weights({"web": 0, "code": 1, "math": 1}, step=5)
    copy = pickle.loads(pickle.dumps(run(loader, 1)))
    assert (copy.step, copy.state_dict()) == (3, loader.state_dict())
    assert tokens(copy, range(8)) == tokens(loader, range(8))


def test_a_state_from_before_a_corpus_was_added_takes_it_out_again(
    make: Make, corpora: dict[str, Path]
) -> None:
    loader = make(weights={"web": 1, "code": 1})
    state, before = loader.state_dict(), tokens(loader, range(4))
    loader.add_corpus("math", corpora["math"], weights={"web": 1, "code": 1, "math": 2})
    loader.load_state_dict(state)
    assert list(loader.corpora) == ["web", "code"]
    assert tokens(loader, range(4)) == before


def test_a_removed_corpus_may_be_absent_and_may_come_back_where_it_stood(
    make: Make, corpora: dict[str, Path]
) -> None:
    loader = run(make(), 5)
    loader.remove_corpus("web")
    again = resumed(run(loader, 2), make("code"))
    assert tokens(again, range(5, 9)) == tokens(loader, range(5, 9))
    assert again.samples_by_corpus(7) == loader.samples_by_corpus(7)
    third = resumed(again, make("code"))
    assert third.state_dict() == again.state_dict() == loader.state_dict()
    with pytest.raises(CorpusError, match=r"'web', which was taken out of the run, is not here.* name it in"):
        third.batch_at(0)
    for each in (loader, third):
        if each is third:
            each.add_corpus("web", corpora["web"], weights={"web": 1, "code": 1})
        else:
            each.set_weights({"web": 1, "code": 1})
    assert tokens(third, range(12)) == tokens(loader, range(12))


def test_another_corpus_cannot_come_back_under_a_removed_ones_name(make: Make, tmp_path: Path) -> None:
    loader = run(make(), 5)
    loader.remove_corpus("web")
    again = resumed(loader, make("code"))
    other = numbered_corpus(tmp_path / "other", [5, 6])
    with pytest.raises(CorpusChanged, match="Corpus 'web' is not the one"):
        again.add_corpus("web", other, weights={"web": 1, "code": 1})
    assert list(again.corpora) == ["code"]


@pytest.mark.parametrize(
    ("told", "kind", "message"),
    [
        (lambda x: x.set_weights({"web": 1}), ConfigError, "'code' has no weight"),
        (lambda x: x.set_weights({"web": 1, "code": 1}, step=1), UsageError, "2 steps were served already"),
        (lambda x: x.add_corpus("web", "x", weights={}), ConfigError, "has a corpus of this name already"),
        (lambda x: x.remove_corpus("wbe"), ConfigError, r"no such corpus .*Did you mean 'web'"),
        (lambda x: x.remove_corpus("web", weights={"cod": 1}), ConfigError, "Did you mean 'code'"),
        (lambda x: x.extend_corpus("wbe"), ConfigError, "no such corpus"),
        (lambda x: x.extend_corpus("web", parts=2), ConfigError, "has 1 parts"),
        (lambda x: x.set_sequence_length(1), ConfigError, "sequence_length must be at least 2"),
        (lambda x: x.set_global_batch_size(0), ConfigError, "global_batch_size must be at least 1"),
        (lambda x: x.skip(samples=range(7, 9)), UsageError, "Samples before 8 were served already"),
        (lambda x: x.skip(steps=range(1, 3)), UsageError, "Samples before 8 were served already"),
        (lambda x: x.skip(samples=range(20, 20)), UsageError, "one sample or more"),
        (lambda x: x.skip(samples=range(20, 30, 2)), UsageError, "one sample or more"),
        (lambda x: x.skip(steps=range(9, 9)), UsageError, "one step or more"),
        (lambda x: x.skip(), UsageError, "either samples or steps"),
        (lambda x: x.find("web", 20, steps=range(3)), UsageError, r"documents 0 to 19 \(got 20\)"),
        (lambda x: x.find("wbe", 0, steps=range(3)), ConfigError, "Did you mean 'web'"),
        (lambda x: x.find("web", 0, steps=range(0, 9, 3)), UsageError, "without gaps"),
        (lambda x: x.batch_at(2**62), UsageError, "within 2.62 samples"),
        (lambda x: x.tokens_before(-1), UsageError, "step must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    make: Make, told: Callable[[Loader], object], kind: type[Exception], message: str
) -> None:
    loader = run(make(), 2)
    state = loader.state_dict()
    with pytest.raises(kind, match=message):
        told(loader)
    assert loader.state_dict() == state
    loader.batch_at(2)


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
def test_a_plan_that_cannot_be_is_refused_at_the_start(make: Make, change: Change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(schedule=[change], world_size=2)


def test_samples_of_two_lengths_are_gathered_apart_but_explained_together(make: Make) -> None:
    loader = run(make(), 2)
    loader.set_sequence_length(16)
    with pytest.raises(UsageError, match=r"different sequence lengths \(got \[8, 16\]\)"):
        loader.gather(np.array([0, 8]))
    rows = loader.explain(np.array([8, 0]))
    assert [sum(piece.tokens for piece in row) for row in rows] == [16, 8]


def test_what_was_prepared_for_another_length_at_the_same_step_is_not_served(make: Make) -> None:
    told = run(make(), 3)
    for length in (16, 12, 24):
        told.set_sequence_length(length)
        told.batch_at(3)
    plain = run(make(), 3)
    plain.set_sequence_length(24)
    assert tokens(told, range(8)) == tokens(plain, range(8))


def test_a_state_from_before_a_growth_loads_and_goes_on_without_it(
    make: Make, corpora: dict[str, Path]
) -> None:
    loader = run(make("web"), 4)
    state, before = loader.state_dict(), tokens(loader, range(60))
    grow(corpora["web"], [25] * 4)
    again = make("web")
    assert again.samples_per_epoch == {"web": 88}, "a new run reads the whole"
    again.load_state_dict(state)
    assert tokens(again, range(60)) == before
    again.extend_corpus("web")
    late = resumed(run(again, 1), make("web"))
    assert late.state_dict() == again.state_dict()
    served = {token for batch in tokens(late, range(30)) for row in batch for token in row if token}
    assert served >= set(range(1, 701))
    loader.load_state_dict(late.state_dict())  # opened before the growth
    assert tokens(loader, range(30)) == tokens(late, range(30))


def test_a_cap_counts_what_is_appended_and_what_is_cut_anew(make: Make, corpora: dict[str, Path]) -> None:
    loader = make("web", epochs={"web": 1}, global_batch_size=1)
    run(loader, 10)
    grow(corpora["web"], [25] * 4)
    loader.extend_corpus("web")
    loader.set_sequence_length(16)
    last = loader.num_samples
    assert last == 10 + -(-(600 - 80) // 16) + -(-100 // 16)
    served = [token for batch in tokens(loader, range(last)) for row in batch for token in row if token]
    assert sorted(served) == list(range(1, 701))
    with pytest.raises(CorpusExhausted):
        loader.batch_at(last)


def test_the_supply_ends_at_the_first_sample_that_is_asked_for_and_not_there(make: Make) -> None:
    loader = make(epochs={"web": 1}, weights={"web": 1, "code": 1}, global_batch_size=1)
    last = loader.num_samples
    assert last is not None
    loader.skip(samples=range(last - 3, last + 4))
    assert loader.num_samples is not None
    assert loader.num_samples >= last + 4, "what is skipped need not be there"
    loader.set_weights({"web": 0, "code": 1})
    assert loader.num_samples is None


def test_what_is_skipped_at_the_start_is_not_served_under_later_ids(make: Make) -> None:
    loader, plain, ids = make(), make(), list(range(40))
    loader.skip(samples=range(20))
    assert loader.samples_of(0)[0] == 20
    for told in (loader, resumed(loader, make())):
        assert (told.gather(ids)["input_ids"] == plain.gather(ids)["input_ids"]).all()
        assert told.explain(ids[:1])[0][0].epoch == 0


@pytest.mark.parametrize("weight", [1e-9, 1e-300])
def test_a_tiny_weight_is_one_slot_of_the_pattern(make: Make, weight: float) -> None:
    loader = make(weights={"web": 1, "code": weight})
    assert loader.samples_by_corpus(2**16) == {"web": 4 * (2**16 - 1), "code": 4}


def test_a_thousand_corpora_are_one_mixture(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [[1, 2, 3, 4, 5]])
    corpora = {f"c{number}": corpus for number in range(1000)}
    plain = {"sequence_length": 4, "num_workers": 0, "deliver": "numpy"}
    loader = Loader(corpora, weights=dict.fromkeys(corpora, 1e-9), global_batch_size=1000, **plain)
    assert set(loader.samples_by_corpus(1).values()) == {1}
    assert loader.batch_at(10**9)["input_ids"].shape == (1000, 4)


def test_a_corpus_smaller_than_a_row_is_a_padded_row_an_epoch_at_any_length(tmp_path: Path) -> None:
    corpus = numbered_corpus(tmp_path / "tiny", [3])
    loader = Loader({"c": corpus}, sequence_length=8, global_batch_size=1, num_workers=0, deliver="numpy")
    run(loader, 2)
    loader.set_sequence_length(5)
    assert loader.batch_at(1)["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]]
    assert loader.batch_at(2)["input_ids"].tolist() == [[1, 2, 3, 0, 0]]


def test_a_recorded_change_takes_few_bytes(make: Make) -> None:
    loader = make()
    sizes = [len(json.dumps(loader.state_dict()))]
    for number in range(10):
        run(loader, 1)
        loader.set_weights({"web": 1, "code": 2 + number % 2})
        sizes.append(len(json.dumps(loader.state_dict())))
    assert sizes[0] < 700
    assert max(np.diff(sizes)) < 80
    loader.set_weights(loader.weights)
    assert len(json.dumps(loader.state_dict())) == sizes[-1], "to be told the same again is no change"
