"""Recipes tried on emulated hosts: what they compute is what they compute anywhere."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import PenstockError, UsageError
from penstock.netlab.hosts import lab, why_not
from penstock.parallel.mesh import World
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.emulated import EmulatedTimes, Emulation
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state
from penstock.train.state import TrainState

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
STEPS = 3


def recipe(folder: Path, **sections: Any) -> TrainConfig:
    return build_recipe(
        {
            "run": {"dir": str(folder / "run"), "steps": STEPS},
            "model": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "vocab_size": 128,
            },
            "data": {
                "corpora": {"c": {"path": "synthetic:tokens=1e6,vocab_size=128"}},
                "sequence_length": 16,
                "global_batch_size": 8,
                "micro_batch_size": 2,
            },
            "compute": "float32",
            **sections,
        }
    )


def said(error: BaseException) -> tuple[str, int]:
    return str(error), 1


def losses_here(config: TrainConfig, *, ranks: int) -> list[float]:
    def work(world: World) -> list[float]:
        return [record["loss"] for record in records_of(open_state(config, world), config, world)]

    return on_ranks(work, ranks=ranks)[0]


def test_losses_on_emulated_hosts_are_those_of_ranks_of_this_machine(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    with lab(hosts=2, nics=2, rate="1gbit") as hosts:
        measured = Emulation(hosts=hosts, steps=STEPS).measure(config, said)
    half = 4 * config.model.num_parameters / 2  # of float32, that the other host holds
    assert all(sent > 2 * half for sent in measured.sent_bytes)  # gathered and reduced, at least once
    assert measured.compute_s > 0
    assert not (tmp_path / "run").exists()
    assert measured.losses == losses_here(config, ranks=2)


def test_replicas_are_whole_and_one_stands_for_the_ranks_that_work_on_the_same_rows(tmp_path: Path) -> None:
    """What each rank sees is checked in it: it is a process of its own."""

    def check(state: TrainState) -> None:
        layout = state.mesh.layout
        assert (layout.world_size, layout.tensor) in ((1, 1), (4, 2)), layout

    config = recipe(tmp_path, parallel={"tensor": 2})
    with lab(hosts=2) as hosts:
        emulation = Emulation(hosts=hosts, processes_per_host=2, steps=STEPS, prepare=check)
        assert len(emulation.measure(config, said).losses) == STEPS


def test_what_a_rank_says_as_it_fails_is_the_error(tmp_path: Path) -> None:
    def fail(_: TrainState) -> None:
        raise PenstockError("Its disk is full")

    with lab(hosts=2) as hosts, pytest.raises(PenstockError, match=r"host failed: Its disk is full\."):
        Emulation(hosts=hosts, steps=STEPS, prepare=fail).measure(recipe(tmp_path), said)


def test_rows_that_do_not_divide_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with lab(hosts=3) as hosts, pytest.raises(UsageError, match="batch"):
        Emulation(hosts=hosts, steps=STEPS).measure(recipe(tmp_path), said)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"run": {"dir": "never", "steps": 2}}, r"ends after 2 steps, before .* \(got 3\)"),
        ({"plan": "auto"}, r"cannot be planned for emulated hosts \(got 'auto'\)"),
    ],
)
def test_a_recipe_that_cannot_be_tried_is_refused_before_anything_runs(
    tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    with lab(hosts=2) as hosts, pytest.raises(UsageError, match=words):
        Emulation(hosts=hosts, steps=STEPS).measure(recipe(tmp_path, **sections), said)


def test_one_step_is_refused_because_the_first_does_not_count() -> None:
    with lab(hosts=1) as hosts, pytest.raises(UsageError, match=r"at least 2 \(got 1\)"):
        Emulation(hosts=hosts, steps=1)


def test_the_busy_share_is_computation_over_step() -> None:
    measured = EmulatedTimes(step_s=4.0, compute_s=3.0, sent_bytes=[1.0], losses=[2.0])
    assert measured.busy == measured.as_json()["busy"] == 0.75
