"""State of a Hugging Face dataset: whether its rows are all rows of its files.

Older versions of `datasets` stored a filtered, shuffled or sliced dataset as the files of the whole one and a
mapping: `indices.arrow`, or a part of each file (`skip`, `take`). Newer ones write the selected rows.
"""

import json
from typing import Any

from penstock.core.errors import CorpusError

STATE = "state.json"
INDICES = "indices.arrow"
"""Name of the mapping."""

_MAPPINGS = ("_indices_files", "_indices_data_files")


def data_files(content: bytes, name: str) -> list[str]:
    """Return the names of the files that a state lists; none if it lists none.

    Args:
        name: of the state, for messages.

    Raises:
        CorpusError: it is no state, or its rows are not all rows of the files.
    """
    try:
        state = json.loads(content)
        files = state.get("_data_files", [])
        names = [str(file["filename"]) for file in files]
        mappings = [key for key in _MAPPINGS if state.get(key)]
        parts = [file["filename"] for file in files if _is_part(file)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fix = "It is truncated or altered: restore it."
        raise CorpusError(f"{name} is no state of a dataset", fix=fix) from None
    if mappings or parts:
        why = f"{STATE} has {mappings[0]}" if mappings else f"{STATE} takes a part of {parts[0]}"
        raise selection_error(name.removesuffix(STATE).rstrip("/") or ".", why=why)
    return names


def selection_error(folder: str, *, why: str = f"it has {INDICES}") -> CorpusError:
    """Return the error for a dataset whose rows are a selection.

    Args:
        why: what in the folder says so.
    """
    return CorpusError(
        f"The dataset {folder} is a selection of the rows in its files ({why}), and Penstock would read all "
        "rows of the files, those that were filtered out too",
        fix="Write the selected rows: in Python `datasets.load_from_disk(FOLDER).flatten_indices()"
        ".save_to_disk(NEW)`, with the version of datasets that wrote it; then give NEW.",
    )


def _is_part(file: Any) -> bool:  # Any: JSON
    return bool(file.get("skip")) or file.get("take") is not None
