"""Rules of a folder's embeddings, from the files that sentence-transformers writes beside a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import InputError, UsageError
from penstock.core.files import TOKENIZER_FILE

LAST_TOKEN: Final = "lasttoken"
_OLD = "pooling_mode_"
_ENCODERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_NEW_NAMES = {
    "tokenizer_args": "processor_kwargs",
    "model_args": "model_kwargs",
    "config_args": "config_kwargs",
}
_APPLIED = frozenset((
    "max_seq_length",
    "model_max_length",
    "padding_side",
    "model_kwargs",
    "config_kwargs",
    "unpad_inputs",
    "query_length",
    "document_length",
    "trust_remote_code",
))  # fmt: skip
"""Settings of a Transformer module that are applied, or do not change the vector of a text without a task."""
_USUAL = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
_STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
_NO_LIMIT = 1e9
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
    max_tokens: int | None = None
    """Longest text in tokens, all that is added included; None: the model's context alone limits it."""
    unsupported: tuple[str, ...] = ()
    """Settings that change vectors and are not applied here, as "name: value"."""

    def check(self) -> None:
        """Refuse a model whose vectors are not the states of last tokens, or have unsupported settings.

        Raises:
            UsageError: with its pooling or settings.
        """
        if self.unsupported:
            raise UsageError(
                "The model's embeddings have settings that Penstock does not apply",
                got=", ".join(self.unsupported),
                fix="Embed with sentence-transformers.",
            )
        if self.pooling != LAST_TOKEN:
            raise UsageError(
                "The model's embeddings are not the state at the last token",
                got=self.pooling,
                fix="Embed with sentence-transformers, or a model that pools the last token.",
            )

    def check_length(self, num_tokens: int) -> None:
        """Refuse a text that sentence-transformers would truncate.

        Raises:
            UsageError: with its number of tokens.
        """
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise UsageError(
                f"The model embeds at most {self.max_tokens:,} tokens (its max_seq_length)",
                got=f"a text of {num_tokens:,}",
                fix="Shorten or split the text; on a server, truncate_prompt_tokens truncates it.",
            )


def read_rules(folder: Path) -> EmbeddingRules:
    """Read the rules of a folder; one without such files has the default ones.

    Raises:
        InputError: a file is not as sentence-transformers writes it.
    """
    prompts = _read(folder / "config_sentence_transformers.json", {})
    named = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name") or "")
    pooling: list[str] = []
    encoder: Mapping[str, Any] = {}
    for kind, path in _modules(folder):
        if kind == "Pooling":
            pooling += _modes(_read(path / "config.json", {}))
        elif kind == "Transformer":
            encoder = _encoder(path)
        elif kind != "Normalize":
            pooling.append(kind)
    return EmbeddingRules(
        prompt=named if isinstance(named, str) else "",
        pooling=", ".join(pooling) or LAST_TOKEN,
        lengths=_lengths(_read(folder / "config.json", {})),
        max_tokens=_max_tokens(folder, encoder),
        unsupported=_unsupported(folder, encoder),
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the kind and the folder of each module."""
    path = folder / "modules.json"
    try:
        return [(one["type"].rpartition(".")[2], folder / one["path"]) for one in _read(path, [])]
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is not a list of modules ({error!r})", fix=_FIX) from None


def _encoder(folder: Path) -> Mapping[str, Any]:
    """Return the settings of a Transformer module, from the first of the files that it may have."""
    settings: Mapping[str, Any] = next(
        filter(None, (_read(folder / f"sentence_{name}_config.json", {}) for name in _ENCODERS)), {}
    )
    found = {_NEW_NAMES.get(key, key): value for key, value in settings.items()}
    for key in ("processor_kwargs", "modality_config"):
        if not isinstance(found.get(key) or {}, dict):
            raise InputError(f"{folder}: {key} of the embeddings is no object", got=found[key], fix=_FIX)
    return found


def _max_tokens(folder: Path, encoder: Mapping[str, Any]) -> int | None:
    """Return the length at which sentence-transformers truncates; without a setting, the tokenizer's."""
    of_call = encoder.get("processor_kwargs") or {}
    found = of_call.get("model_max_length", encoder.get("max_seq_length"))
    if found is None and (folder / "modules.json").is_file():
        found = _read(folder / "tokenizer_config.json", {}).get("model_max_length")
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or found < 1:
        raise InputError(
            f"{folder}: max_seq_length of the embeddings is no number of tokens", got=found, fix=_FIX
        )
    return int(found) if found < _NO_LIMIT else None


def _unsupported(folder: Path, encoder: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings of a Transformer module that change vectors and are not applied."""
    found = {key: value for key, value in encoder.items() if value and key not in _APPLIED}
    for key, usual in _USUAL.items():
        if found.get(key) == usual:
            del found[key]
    texts = (found.pop("modality_config", None) or {}).get("text", _STATES)
    found |= {} if texts == _STATES else {"modality_config": texts}
    of_call = found.pop("processor_kwargs", {})
    found |= {key: value for key, value in of_call.items() if key not in _APPLIED}
    if found.get("do_lower_case") and _lowers(_read(folder / TOKENIZER_FILE, {}).get("normalizer")):
        del found["do_lower_case"]
    return tuple(f"{key}: {json.dumps(value)[:60]}" for key, value in found.items())


def _lowers(normalizer: Any) -> bool:  # Any: JSON
    """Return whether a normalizer makes text lower-case itself; then sentence-transformers adds nothing."""
    parts = [normalizer, *normalizer.get("normalizers", ())] if isinstance(normalizer, dict) else ()
    return any(isinstance(one, dict) and one.get("type") == "Lowercase" for one in parts)


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
