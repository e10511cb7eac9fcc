"""Kernels of a run: rank 0 chooses for all, checkpoints record them, and a resumed run uses them again."""

from pathlib import Path
from typing import Any

import pytest

from penstock.devices.kernel_table import ChosenKernel, KernelTable
from penstock.parallel.mesh import World
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train import kernels
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.run import _resume_changes
from penstock.train.setup import open_state

DOCUMENTS = "attention.documents"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[1 + (start * 7 + 3 * i) % 49 for i in range(11)] for start in range(200)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=50)


def recipe_of(corpus: Path, folder: Path, **more: Any) -> TrainConfig:
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": 4},
            "model": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 50,
            },
            "data": {"corpora": {"c": {"path": str(corpus)}}, "sequence_length": 16, "global_batch_size": 4},
            "compute": "float32",
            **more,
        }
    )


def started(recipe: TrainConfig, world: World, *, stop_at: int) -> dict[str, Any]:
    """Train to a step, which saves; return what this rank computes with."""
    state = open_state(recipe, world)
    changes = [(one.setting, one.saved, one.told) for one in _resume_changes(state)]
    records_of(state, recipe, world, stop_at=stop_at)
    attend = state.model.choose.keywords["kernels"]  # type: ignore[union-attr, operator]
    return {"chosen": state.kernels.chosen, "attend": attend, "changes": changes}


def test_a_pinned_choice_is_that_of_all_ranks_and_of_the_resumed_run(corpus: Path, tmp_path: Path) -> None:
    pinned = tmp_path / "table.json"
    KernelTable(
        rows={f"{DOCUMENTS} 9": ChosenKernel(kernel="SDPA with a mask", us={"SDPA with a mask": 1.0})}
    ).write(pinned)
    recipe = recipe_of(corpus, tmp_path / "run", kernels=str(pinned))

    def work(world: World) -> list[dict[str, Any]]:
        first = started(recipe, world, stop_at=2)
        if world.is_first:  # another choice, which a run that has one does not read
            KernelTable(rows={f"{DOCUMENTS} 9": ChosenKernel(kernel="documents")}).write(pinned)
        return [first, started(recipe, world, stop_at=4)]

    found = on_ranks(work, ranks=2)
    expected = {"attention.rows": "SDPA", DOCUMENTS: "SDPA with a mask"}
    assert found == [[{"chosen": expected, "attend": expected, "changes": []}] * 2] * 2


def test_a_recorded_kernel_that_is_missing_is_replaced_and_said(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(corpus, tmp_path / "run")
    old = KernelTable(
        device="an old device", rows={f"{DOCUMENTS} 9": ChosenKernel(kernel="of an old device")}
    )

    def work(world: World) -> list[dict[str, Any]]:
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "choose", lambda *_, **__: old)
            first = started(recipe, world, stop_at=2)
        return [first, started(recipe, world, stop_at=4)]

    for first, second in on_ranks(work, ranks=2):
        assert first["chosen"] == {DOCUMENTS: "of an old device"}
        assert second["chosen"] == {"attention.rows": "SDPA", DOCUMENTS: "documents"}
        assert second["changes"] == [(f"kernels.{DOCUMENTS}", "of an old device", "documents")]


def test_a_file_that_is_no_table_is_refused_on_every_rank(corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, tmp_path / "run", kernels=str(tmp_path / "none.json"))
    with pytest.raises(AssertionError, match="There is no table of kernels in"):
        on_ranks(lambda world: started(recipe, world, stop_at=1), ranks=2)
