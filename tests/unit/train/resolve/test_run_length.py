"""A run whose length is in epochs: its steps, when it begins and when it is resumed."""

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.data import Loader
from penstock.testing.corpora import write_corpus
from penstock.train.control.apply_request import take_up
from penstock.train.control.requests import ControlRequest
from penstock.train.data_setup import check_supply, train_loader
from penstock.train.planning.devices import plan_recipe
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve import run_length
from penstock.train.resolve.load import build_for_others, build_recipe, with_settings
from penstock.train.resolve.summary import derive
from penstock.train.setup import write_identity
from tests.growing import streamed_corpus

ROWS = 8  # of 16 tokens in the corpus: 40 documents of 3
MORE = 23  # in another of 120


@pytest.fixture
def raw(raw: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    raw["run"] = {"dir": str(tmp_path / "run"), "epochs": 3}
    raw["data"]["global_batch_size"] = 3
    return raw


@pytest.fixture
def two(raw: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    more = write_corpus(tmp_path / "more", [[4, 5, 6]] * 120, vocab_size=50)
    raw["data"]["corpora"]["more"] = {"path": str(more)}
    return raw


def loader_of(config: TrainConfig) -> Loader:
    return train_loader(config, rank=0, world_size=1, num_workers=0, deliver="numpy")


class Saved:
    """Checkpoint of a loader's state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def index(self) -> Any:  # Any: a stand-in
        return type("Index", (), {"meta": type("Meta", (), {"loader": self.state})})


@pytest.fixture
def begun(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Loader:
    """A run of 8 steps of 3 rows, saved after the fourth."""
    config = build_recipe(raw)
    loader = loader_of(config)
    write_identity(config, loader)
    monkeypatch.setattr(run_length, "checkpoints", lambda _config: [Saved(loader.state_at(4))])
    return loader


@pytest.mark.parametrize("epochs", [3, 1, 0.5, 0.1, 2.5, 7])
@pytest.mark.parametrize("rows", [1, 3, 8, 100])
def test_epochs_are_rounded_up_to_whole_steps(raw: dict[str, Any], epochs: float, rows: int) -> None:
    raw["run"]["epochs"], raw["data"]["global_batch_size"] = epochs, rows
    assert build_recipe(raw).run.steps == math.ceil(math.ceil(epochs * ROWS) / rows)


def test_several_corpora_are_counted_together(two: dict[str, Any]) -> None:
    assert build_recipe(two).run.steps == 3 * (ROWS + MORE) / 3


@pytest.mark.parametrize(
    ("weights", "is_fine"), [((1, 3), True), ((0.25, 0.75), True), ((25.2, 75), True), ((1, 2), False)]
)
def test_weights_must_be_in_proportion_to_tokens(
    two: dict[str, Any], weights: tuple[float, float], is_fine: bool
) -> None:
    for corpus, weight in zip(two["data"]["corpora"].values(), weights, strict=True):
        corpus["weight"] = weight
    if is_fine:
        assert build_recipe(two).run.steps == ROWS + MORE
        return
    with pytest.raises(ConfigError, match=r"not in proportion to their tokens.*c: 0\.333, by tokens 0\.25"):
        build_recipe(two)


@pytest.mark.parametrize(
    ("section", "changes", "said"),
    [
        ("schedule", [{"at_step": 2, "weights": {"c": 1, "more": 1}}], "data.schedule changes their shares"),
        ("adaptive", {"policy": "online_data_mixing"}, "data.adaptive changes their shares"),
    ],
)
def test_shares_that_change_are_refused(two: dict[str, Any], section: str, changes: Any, said: str) -> None:
    two["data"][section] = changes
    with pytest.raises(ConfigError, match=said):
        build_recipe(two)


def test_planned_batches_and_lengths_count(raw: dict[str, Any]) -> None:
    raw["data"]["schedule"] = [{"at_step": 2, "global_batch_size": 6}]
    assert build_recipe(raw).run.steps == 2 + (3 * ROWS - 2 * 3) / 6
    raw["data"]["schedule"] = [{"at_step": 2, "sequence_length": 32}]
    config = build_recipe(raw)
    loader, steps = loader_of(config), config.run.steps
    passed = [loader.epochs_by_corpus(step)["c"] for step in (steps - 1, steps)]
    assert passed[0] < 3 <= passed[1] < 3.8, "the last step of 3 rows of 32 tokens makes 0.8"


def test_a_cap_on_epochs_rounds_down(raw: dict[str, Any]) -> None:
    raw["data"]["global_batch_size"] = 5
    assert build_recipe(raw).run.steps == 5, "25 rows of 24"
    raw["data"]["corpora"]["c"]["epochs"] = 3
    config = build_recipe(raw)
    assert config.run.steps == 4
    check_supply(config, loader_of(config))
    raw["data"]["corpora"]["c"]["epochs"] = 2
    capped = build_recipe(raw)
    with pytest.raises(ConfigError, match=r"run\.epochs 3 needs 20 .*'c' reaches .* 2 epochs.*Lower run\.ep"):
        check_supply(capped, loader_of(capped))


def test_a_corpus_in_preparation_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["data"]["corpora"]["c"]["path"] = str(streamed_corpus(tmp_path / "text", [6] * 20))
    with pytest.raises(ConfigError, match="'c' is still being prepared, so its rows are not counted yet"):
        build_recipe(raw)


def test_exactly_one_length_is_given(raw: dict[str, Any]) -> None:
    raw["run"]["steps"] = 5
    for build in (build_recipe, build_for_others, plan_recipe):
        with pytest.raises(
            ConfigError, match=r"run\.steps and run\.epochs are both given .*5 and 3.*Keep one"
        ):
            build(raw)
    del raw["run"]["steps"], raw["run"]["epochs"]
    with pytest.raises(ConfigError, match=r"run\.steps must be at least 1 where run\.epochs is not given"):
        build_recipe(raw)


@pytest.mark.parametrize("epochs", [0, -1, 2e6])
def test_epochs_out_of_range_are_refused(raw: dict[str, Any], epochs: float) -> None:
    raw["run"]["epochs"] = epochs
    with pytest.raises(ConfigError, match=r"run\.epochs must be above 0 and at most 1,000,000"):
        build_recipe(raw)


def test_a_setting_replaces_the_other_length(raw: dict[str, Any]) -> None:
    assert build_recipe(with_settings(raw, ["run.steps=12"])).run.steps == 12
    raw["run"] = {"dir": raw["run"]["dir"], "steps": 7}
    assert build_recipe(with_settings(raw, ["run.epochs=1"])).run.steps == 3
    with pytest.raises(ConfigError, match="both given"):
        build_recipe(with_settings(raw, ["run.epochs=1", "run.steps=2"]))


def test_a_dry_run_shows_both(raw: dict[str, Any]) -> None:
    derived = derive(build_recipe(raw), world_size=1)
    assert derived.numbers["steps"] == derived.recipe["run"]["steps"] == 8
    assert derived.recipe["run"]["epochs"] == 3
    assert derived.numbers["epochs of c"] == 3


def test_a_plan_without_the_corpora_does_not_know_the_steps(raw: dict[str, Any]) -> None:
    assert plan_recipe(raw, devices=[1]).tokens == 8 * 3 * 16
    raw["data"]["corpora"]["c"]["path"] = "elsewhere"
    assert plan_recipe(raw, devices=[1]).tokens == 0
    assert build_for_others(raw).run.steps == 0


@pytest.mark.usefixtures("begun")
def test_a_resumed_run_keeps_its_steps_and_an_edited_one_counts_from_where_it_is(raw: dict[str, Any]) -> None:
    raw["optim"] = {"learning_rate": 0.5}
    assert build_recipe(raw).run.steps == 8
    raw["data"]["global_batch_size"] = 6
    assert build_recipe(raw).run.steps == 4 + 12 / 6, "12 rows were read before the edit"
    raw["run"]["epochs"], raw["data"]["global_batch_size"] = 4, 3
    assert build_recipe(raw).run.steps == 11


def test_a_batch_size_that_is_set_in_mid_run_keeps_the_steps(
    raw: dict[str, Any], begun: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_recipe(raw)
    begun.load_state_dict(begun.state_at(4))
    reply = take_up(begun, config, ControlRequest(number=1, batch_size=6))
    assert "keeps its 8 steps, which now make these epochs: 4.5 of c" in reply.said
    monkeypatch.setattr(run_length, "checkpoints", lambda _config: [Saved(begun.state_at(5))])
    assert build_recipe(raw).run.steps == 8, "as if it had not been stopped"
