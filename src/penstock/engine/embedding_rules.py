"""Rules of a folder's embeddings, from the files that sentence-transformers writes beside a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import InputError, UsageError

LAST_TOKEN: Final = "lasttoken"
_OLD = "pooling_mode_"
_FIX = "Restore it from the folder it came from."


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRules:
    """Text before each embedded one, and what a vector is made of."""

    prompt: str = ""
    """Text put before each text: that of `default_prompt_name`."""
    pooling: str = LAST_TOKEN
    """States that make up a vector; the last token's are the only ones computed here."""
    lengths: tuple[int, ...] | None = ()
    """Lengths to which vectors may be shortened (Matryoshka); None: any."""

    def check(self) -> None:
        """Refuse a model whose vectors are not the states of last tokens.

        Raises:
            UsageError: with its pooling.
        """
        if self.pooling != LAST_TOKEN:
            raise UsageError(
                "The model's embeddings are not the state at the last token",
                got=self.pooling,
                fix="Embed with sentence-transformers, or a model that pools the last token.",
            )


def read_rules(folder: Path) -> EmbeddingRules:
    """Read the rules of a folder; one without such files has the default ones.

    Raises:
        InputError: a file is not as sentence-transformers writes it.
    """
    prompts = _read(folder / "config_sentence_transformers.json", {})
    named = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name") or "")
    return EmbeddingRules(
        prompt=named if isinstance(named, str) else "",
        pooling=_pooling(folder),
        lengths=_lengths(_read(folder / "config.json", {})),
    )


def _pooling(folder: Path) -> str:
    """Return the pooling of a folder's modules, with the names of modules that do more to a vector."""
    found: list[str] = []
    try:
        for module in _read(folder / "modules.json", []):
            kind = module["type"].rpartition(".")[2]
            if kind == "Pooling":
                found += _modes(_read(folder / module["path"] / "config.json", {}))
            elif kind not in ("Transformer", "Normalize"):
                found.append(kind)
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{folder / 'modules.json'} is not a list of modules ({error!r})", fix=_FIX
        ) from None
    return ", ".join(found) or LAST_TOKEN


def _modes(stored: Mapping[str, Any]) -> list[str]:
    """Return the pooling modes of a module: a name, names, or a key for each as older versions write."""
    modes = stored.get("pooling_mode")
    if modes is None:
        modes = [name.removeprefix(_OLD) for name in stored if name.startswith(_OLD) and stored[name]]
    return [modes] if isinstance(modes, str) else list(modes) or ["mean"]


def _lengths(stored: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the embedding lengths that a model was trained for, under the keys that vLLM reads."""
    lengths = stored.get("matryoshka_dimensions")
    if isinstance(lengths, list):
        return tuple(length for length in lengths if isinstance(length, int))
    return None if stored.get("is_matryoshka") is True else ()


def _read(path: Path, default: Any) -> Any:  # Any: JSON
    """Return the JSON of a file, which has the type of `default`; `default` if there is no file."""
    if not path.is_file():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error})", fix=_FIX) from None
    if not isinstance(value, type(default)):
        raise InputError(f"{path} is JSON of another kind", got=type(value).__name__, fix=_FIX)
    return value
