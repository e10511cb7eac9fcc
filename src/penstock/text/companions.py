"""Files that belong to a tokenizer.json: names of special tokens, chat templates, end tokens of answers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.config import load_json
from penstock.core.errors import ConfigError, InputError

GENERATION = "generation_config.json"
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", *_TEMPLATES, GENERATION)


def companions_of(folders: Sequence[Path]) -> dict[str, str]:
    """Return the companion files of a tokenizer by name, each from the first folder that has it.

    Chat templates are all of one folder, the first that has any: two belong together.
    If only the config.json of a model names the end tokens of answers, a generation_config.json names them
    here: other folders, of runs for instance, have a config.json of another kind.

    Raises:
        InputError: one is not text, or not valid JSON.
    """
    found: dict[str, str] = {}
    for folder in folders:
        has_template = any(name in found for name in _TEMPLATES)
        for name in COMPANIONS:
            if name not in found and (folder / name).is_file() and not (has_template and name in _TEMPLATES):
                found[name] = _text(folder / name)
    if (ends := _end_ids(folders)) is not None:
        known = json.loads(found.get(GENERATION, "{}"))
        if known.get("eos_token_id") is None:
            found[GENERATION] = json.dumps({**known, "eos_token_id": ends}, indent=1) + "\n"
    return found


def with_end_ids(files: dict[str, str], ids: Sequence[int], *, own: int | None) -> dict[str, str]:
    """Return companion files that name these end tokens of answers besides those that they name already.

    Args:
        own: the tokenizer's end token, which is that of answers if the files name none; None: it has none.
    """
    named = end_ids(files)
    if named is None:
        named = [] if own is None else own
    ends = [*dict.fromkeys([*(named if isinstance(named, list) else [named]), *ids])]
    if not ids or ends == named:
        return files
    known = json.loads(files.get(GENERATION, "{}"))
    return {**files, GENERATION: json.dumps({**known, "eos_token_id": ends}, indent=1) + "\n"}


def end_ids(files: dict[str, str]) -> int | list[int] | None:
    """Return the end tokens that companion files name; None if they name none."""
    ends: int | list[int] | None = json.loads(files.get(GENERATION, "{}")).get("eos_token_id")
    return ends


def _end_ids(folders: Sequence[Path]) -> int | list[int] | None:
    paths = [path for folder in folders if (path := folder / "config.json").is_file()]
    return next((ends for path in paths if (ends := model_end_ids(_json(path))) is not None), None)


def model_end_ids(config: Mapping[str, Any]) -> Any:  # Any: JSON
    """Return the end tokens that a `config.json` names: of the model, or else of its language model."""
    ends, text = config.get("eos_token_id"), config.get("text_config")
    return text.get("eos_token_id") if ends is None and isinstance(text, Mapping) else ends


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", fix="Restore it.") from None
    if path.name == GENERATION:
        _json(path)
    return text


def _json(path: Path) -> dict[str, Any]:  # Any: JSON
    try:
        return load_json(path)
    except ConfigError as error:
        raise InputError(str(error).removesuffix("."), fix="Restore it.") from None
