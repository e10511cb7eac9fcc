"""Route of a comparison: the settings in which two runs differ, and whether their losses can be compared."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from penstock.console.state import console_of, run_of
from penstock.core.toml import differences, flat, plain
from penstock.obs.run_data.discover import FoundRun
from penstock.obs.run_data.run_files import tokenizer_of

router = APIRouter(prefix="/api")


@router.get("/runs/{run_id}/compare")
def compare(request: Request, run_id: str, other: Annotated[str, Query(alias="with")]) -> dict[str, Any]:
    """Return the differences of two runs' recipes. Any: JSON."""
    runs = run_of(request, run_id), run_of(request, other)
    recipes = [console_of(request).summaries.recipe(run) for run in runs]
    found = differences(*recipes)
    vocabularies = {_vocabulary(run, dict(flat(recipe))) for run, recipe in zip(runs, recipes, strict=True)}
    is_one = len(vocabularies) == 1
    return {
        "differences": [
            {"key": key, "values": [None if value is None else plain(value) for value in values]}
            for key, values in found.items()
            if key != "run.dir"
        ],
        "comparable_loss": is_one,
        "note": "" if is_one else "Their tokenizers differ: compare bits per byte, not losses per token.",
    }


def _vocabulary(run: FoundRun, settings: dict[str, Any]) -> str:  # Any: JSON
    return tokenizer_of(run.files) or f"{settings.get('model.vocab_size')} tokens"
