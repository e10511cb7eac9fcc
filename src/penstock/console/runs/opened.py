"""A run opened for what only its recipe and corpora tell: its rows, its mixture, its prompts."""

from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.train.inspect.open_run import OpenRun, open_run


def opened_run(folder: Path, *, fields: Sequence[str] = ()) -> OpenRun:
    """Open a run.

    Args:
        fields: columns beside the tokens that its rows are to have.

    Raises:
        PenstockError: its recipe is invalid, or its files or corpora cannot be read.
    """
    try:
        return open_run(folder, fields=fields)
    except OSError as error:
        raise PenstockError(
            f"The data of this run cannot be read: {error}", fix="Have its corpora moved, or been deleted?"
        ) from None
