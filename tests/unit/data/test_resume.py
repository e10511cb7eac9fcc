"""Going on from a state: exactly as saved, whatever this loader was told, unless that is asked for."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CorpusChanged, StateMismatch, UsageError
from penstock.data import Loader
from penstock.data.loader_state import OnChange
from penstock.data.schedule.change_log import Change
from penstock.testing.corpora import numbered_corpus
from tests.loaders import resumed, run, tokens

Make = Callable[..., Loader]

OTHER: dict[str, Any] = {
    "weights": {"weights": {"web": 1, "code": 9}},
    "global_batch_size": {"global_batch_size": 8},
    "sequence_length": {"sequence_length": 24},
}


@pytest.mark.parametrize("setting", OTHER)
def test_another_setting_is_reported_and_only_applied_where_that_is_asked_for(
    mix: Make, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loader = run(mix(weights={"web": 1, "code": 1}), 3)
    again = resumed(loader, mix(**{"weights": {"web": 1, "code": 1}, **OTHER[setting]}))
    assert tokens(again, range(8)) == tokens(loader, range(8))
    [change] = again.resume_changes
    assert (change.step, change.setting, change.applied) == (3, setting, False)
    assert f"At step 3, {setting} is given" in caplog.text
    assert "not applied" in caplog.text
    caplog.clear()
    later = mix(**{"weights": {"web": 1, "code": 1}, **OTHER[setting]})
    later.load_state_dict(run(again, 1).state_dict(), on_change="apply")
    [change] = later.resume_changes
    assert (change.step, change.applied) == (4, True)
    assert tokens(later, range(4)) == tokens(loader, range(4))
    assert tokens(later, range(4, 8)) != tokens(loader, range(4, 8))
    assert "not applied" not in caplog.text


def test_what_is_as_it_was_or_as_the_run_was_told_since_is_no_change(mix: Make) -> None:
    loader = run(mix(weights={"web": 1, "code": 1}), 3)
    loader.set_weights({"web": 3, "code": 1})
    loader.set_global_batch_size(8)
    for told in (
        {"weights": {"web": 1, "code": 1}},
        {"weights": {"web": 3, "code": 1}, "global_batch_size": 8},
    ):
        again = mix(**told)
        again.load_state_dict(loader.state_dict(), on_change="apply")
        assert (again.resume_changes, again.weights["web"]) == ((), 0.75)
        assert tokens(again, range(8)) == tokens(loader, range(8))


def test_weights_that_are_not_given_are_no_wish_for_others(mix: Make) -> None:
    loader = run(mix(weights={"web": 1, "code": 9}), 3)
    again = resumed(loader, mix())
    assert (again.resume_changes, again.weights["web"]) == ((), 0.1)
    again.load_state_dict(loader.state_dict(), on_change="apply")
    assert [change.told for change in again.resume_changes] == [None]
    assert again.weights["web"] == 0.6, "in proportion to tokens"


def test_a_choice_that_does_not_exist_is_refused(mix: Make) -> None:
    with pytest.raises(UsageError, match=r"on_change has no such choice \(got 'ask'\)\. Known: keep, apply"):
        mix().load_state_dict(mix().state_dict(), on_change="ask")  # type: ignore[arg-type]


# a corpus that was added


@pytest.fixture
def grown(mix: Make, corpora: dict[str, Path]) -> Loader:
    """A loader of web and code to which math was added at step 3, two steps on."""
    loader = run(mix(weights={"web": 1, "code": 1}), 3)
    loader.add_corpus("math", corpora["math"], weights={"web": 1, "code": 1, "math": 2})
    return run(loader, 2)


@pytest.mark.parametrize("step", [3, 5])
def test_a_corpus_that_was_added_is_opened_where_it_was_found(mix: Make, grown: Loader, step: int) -> None:
    again = mix(weights={"web": 1, "code": 1})
    again.load_state_dict(json.loads(json.dumps(grown.state_at(step))))
    assert tokens(again, range(9)) == tokens(grown, range(9))
    assert list(again.corpora) == ["web", "code", "math"]
    assert again.state_at(7) == grown.state_at(7)


def test_a_corpus_that_was_added_may_be_named_and_lie_elsewhere(
    mix: Make, grown: Loader, corpora: dict[str, Path], tmp_path: Path
) -> None:
    state = grown.state_dict()
    corpora["math"] = Path(shutil.move(corpora["math"], tmp_path / "elsewhere"))
    with pytest.raises(
        StateMismatch, match=r"corpus 'math', which was added .* Name it in corpora at its present path"
    ):
        mix(weights={"web": 1, "code": 1}).load_state_dict(state)
    again = mix("web", "code", "math")
    again.load_state_dict(state)
    assert tokens(again, range(9)) == tokens(grown, range(9))


def test_another_corpus_at_the_place_of_one_that_was_added_is_refused(
    mix: Make, grown: Loader, corpora: dict[str, Path]
) -> None:
    shutil.rmtree(corpora["math"])
    numbered_corpus(corpora["math"], [7] * 9)
    with pytest.raises(CorpusChanged, match="Corpus 'math' is not the one"):
        mix(weights={"web": 1, "code": 1}).load_state_dict(grown.state_dict())


def test_a_corpus_that_is_only_named_stays_out_until_that_is_asked_for(mix: Make) -> None:
    loader = run(mix(weights={"web": 1, "code": 1}), 3)
    again = resumed(loader, mix("web", "code", "math", weights={"web": 1, "code": 1, "math": 2}))
    assert {change.setting for change in again.resume_changes} == {"weights", "corpora"}
    assert list(again.corpora) == ["web", "code"]
    assert tokens(again, range(8)) == tokens(loader, range(8))
    later = mix("web", "code", "math", weights={"web": 1, "code": 1, "math": 2})
    later.load_state_dict(loader.state_dict(), on_change="apply")
    assert later.weights == {"web": 0.25, "code": 0.25, "math": 0.5}
    assert tokens(later, range(3)) == tokens(loader, range(3))


# a corpus that was taken out


def test_a_corpus_that_was_taken_out_is_asked_for_no_more(mix: Make) -> None:
    loader = run(mix("web", "code", "math", weights={"web": 1, "code": 1, "math": 2}), 3)
    loader.remove_corpus("math")
    loader.set_weights({"web": 3, "code": 1})
    again = resumed(run(loader, 2), mix(weights={"web": 1, "code": 1}))
    assert tokens(again, range(3, 9)) == tokens(loader, range(3, 9))
    again.set_weights({"web": 1, "code": 1})
    assert again.samples_by_corpus(3)["math"] == loader.samples_by_corpus(3)["math"]
    whole = resumed(loader, mix("web", "code", "math", weights={"web": 1, "code": 1, "math": 2}))
    assert tokens(whole, range(9)) == tokens(loader, range(9)), "who has it can read the past"


def test_a_corpus_that_never_served_a_sample_leaves_nothing_in_the_state(
    mix: Make, corpora: dict[str, Path]
) -> None:
    loader, untold = run(mix(weights={"web": 1, "code": 1}), 3), run(mix(weights={"web": 1, "code": 1}), 3)
    loader.add_corpus("math", corpora["math"], weights={"web": 1, "code": 1, "math": 2})
    loader.remove_corpus("math")
    assert "math" not in json.dumps({**loader.state_dict(), "mix": []})
    assert tokens(loader, range(8)) == tokens(untold, range(8))


@pytest.mark.parametrize("on_change", ["keep", "apply"])
def test_a_state_of_before_a_removal_is_gone_on_with_where_no_sample_was_served(
    mix: Make, on_change: OnChange
) -> None:
    loader, untold = (mix(weights={"web": 1, "code": 3}) for _ in range(2))
    state = loader.state_dict()
    loader.remove_corpus("code")
    assert list(loader.corpora) == ["web"]
    loader.load_state_dict(state, on_change=on_change)
    assert tokens(loader, range(5)) == tokens(untold, range(5))
    assert loader.resume_changes == ()


def test_a_planned_mixture_of_what_was_taken_out_is_passed_over_on_a_resume(mix: Make) -> None:
    plan = [
        Change(step=6, weights={"web": 0, "code": 0, "math": 2}),
        Change(step=8, weights={"web": 1, "code": 0, "math": 1}),
    ]
    three = {"weights": {"web": 1, "code": 1, "math": 1}, "schedule": plan}
    loader = run(mix("web", "code", "math", **three), 3)
    loader.set_weights({"web": 1, "code": 3, "math": 2}, step=6)
    loader.remove_corpus("math")
    again = resumed(loader, mix("web", "code", "math", **three))
    told = [(step, mixture) for step, mixture, _ in again.mixtures if step >= 3]
    assert told == [(3, {"web": 0.5, "code": 0.5}), (8, {"web": 1.0, "code": 0.0})]


def test_a_plan_does_not_bring_back_what_was_taken_out(mix: Make) -> None:
    plan = [Change(step=6, weights={"web": 1, "code": 1, "math": 2})]
    three = {"weights": {"web": 2, "code": 1, "math": 1}, "schedule": plan}
    loader = run(mix("web", "code", "math", **three), 3)
    loader.remove_corpus("math")
    for each in (loader, resumed(loader, mix("web", "code", "math", **three))):
        assert [mixture for _, mixture, _ in each.mixtures][-1] == {"web": 0.5, "code": 0.5}
        assert tokens(each, range(3, 9)) == tokens(loader, range(3, 9))


def test_a_recipe_that_drops_a_corpus_takes_it_out(mix: Make) -> None:
    loader = run(mix("web", "code", "math", weights={"web": 1, "code": 1, "math": 2}), 3)
    with pytest.raises(
        StateMismatch, match=r"trains on corpus 'math', which this loader does not have\. Name it"
    ):
        mix(weights={"web": 1, "code": 1}).load_state_dict(loader.state_dict())
    again = mix(weights={"web": 1, "code": 1})
    again.load_state_dict(loader.state_dict(), on_change="apply")
    assert again.weights == {"web": 0.5, "code": 0.5}


def test_a_small_change_of_weights_is_a_change(mix: Make) -> None:
    again = mix(weights={"web": 0.75001, "code": 0.24999})
    again.load_state_dict(mix(weights={"web": 3, "code": 1}).state_dict(), on_change="apply")
    assert [change.setting for change in again.resume_changes] == ["weights"]
    assert again.weights["web"] == 0.75001


def test_the_mixture_goes_on_through_a_change_of_length(mix: Make) -> None:
    loader = run(mix(weights={"web": 2, "code": 1}), 1)
    loader.set_sequence_length(16)
    run(loader, 1)
    assert loader.corpora_of(loader.samples_of(1)).size == 4
    order = "".join("wc"[i] for step in range(3) for i in by_id(loader, step))
    assert order == "wcwwcwwcwwcw"
    again = resumed(loader, mix(weights={"web": 2, "code": 1}))
    assert tokens(again, range(6)) == tokens(loader, range(6))


def by_id(loader: Loader, step: int) -> list[int]:
    samples = loader.samples_of(step)
    samples.sort()
    found: list[int] = loader.corpora_of(samples).tolist()
    return found


def test_rows_of_an_epoch_go_by_name_however_the_corpora_are_listed(mix: Make) -> None:
    loader = run(mix("web", "code", weights={"web": 1, "code": 1}), 2)
    again = resumed(loader, mix("code", "web", weights={"web": 1, "code": 1}))
    assert again.samples_per_epoch == loader.samples_per_epoch
    assert again.first_rows == loader.first_rows
