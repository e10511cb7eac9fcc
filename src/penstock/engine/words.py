"""What a model's folder says about text: its tokenizer, the tokens that begin and end, the chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import tokenizers

from penstock.core.config import load_json
from penstock.core.errors import InputError
from penstock.engine.text_stream import TextStream
from penstock.text.chat import ChatTemplate, Message, load_template, render
from penstock.text.tokenizer import Tokenizer

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_LARGE = 1e9

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Between text and tokens, as one model reads and writes them; safe to share between threads."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    start_ids: tuple[int, ...] = ()
    """Tokens before every prompt but a chat's, whose template writes them."""
    template: ChatTemplate = field(default_factory=ChatTemplate)
    """How conversations are written."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """How its authors recommend to draw: what `generation_config.json` says of `temperature`, `top_k`..."""
    trust_contents: bool = False
    """Whether names of special tokens in messages stand for those tokens, as in transformers; by default they
    are text, because whoever writes a message could write other turns with them."""
    vector_lengths: tuple[int, ...] | None = ()
    """Lengths to which its vectors may be cut, besides their own; None: any."""
    _singles: dict[int, str] = field(default_factory=dict)
    """Texts of single tokens."""

    @classmethod
    def load(cls, tokenizer_path: Path, *, trust_contents: bool = False) -> Self:
        """Read tokenizer.json and the files beside it.

        Raises:
            InputError, ModelError: one of them cannot be read.
        """
        tokenizer, template = Tokenizer.load(tokenizer_path), load_template(tokenizer_path.parent)
        return cls(
            tokenizer=tokenizer,
            stop_ids=_stop_ids(tokenizer_path.parent, tokenizer, template),
            start_ids=_start_ids(tokenizer_path),
            template=template,
            trust_contents=trust_contents,
            sampling=_sampling(tokenizer_path.parent / "generation_config.json"),
            vector_lengths=_vector_lengths(tokenizer_path.parent / "config.json"),
        )

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, with those that begin every text of this model.

        An empty prompt is the end token: what follows it in training is a new document.
        """
        ids = [*self.start_ids, *self.tokenizer.encode(prompt)]
        return ids or [token for token in (self.tokenizer.eos_id,) if token is not None]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids after which the answer to these messages follows.

        Raises:
            UsageError: the template refuses these messages.
            ModelError: the template is not valid.
        """
        return self.encode_rendered(render(self.guarded(messages), self.template))

    def guarded(self, given: T) -> T:
        """Return what a client gave of a conversation, as the template may be told it.

        Raises:
            UsageError: it is nested too deeply.
        """
        if self.template.source is None or self.trust_contents:
            return given
        return self.tokenizer.guarded(given)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of what the template made of a conversation."""
        return (
            self.encode(text) if self.template.source is None else self.tokenizer.encode(text, special=True)
        )

    def stream(self, stop_texts: Sequence[str] = ()) -> TextStream:
        """Return a decoder of one answer."""
        return TextStream(self._decode, stop_texts=stop_texts)

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; that of single ones is kept, as streams ask for it with every token."""
        if len(ids) != 1:
            return self.tokenizer.decode(ids)
        text = self._singles.get(ids[0])
        if text is None:
            text = self._singles[ids[0]] = self.tokenizer.decode(ids)
        return text


def _stop_ids(folder: Path, tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """Collect the end tokens that the tokenizer, its config and those of generation and the model name."""
    named = template.variables.get("eos_token", "")
    found: list[Any] = [tokenizer.eos_id, tokenizer.vocabulary().get(named)]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            stored: Any = load_json(folder / name).get("eos_token_id")  # an id or a list of ids
            found += stored if isinstance(stored, list) else [stored]
    return frozenset(token for token in found if isinstance(token, int) and token >= 0)  # -1: none


def _sampling(path: Path) -> dict[str, float]:
    """Read the settings of drawing that a model comes with; null is none."""
    stored: Mapping[str, Any] = load_json(path) if path.is_file() else {}
    found = {name: stored[name] for name in _SAMPLING if stored.get(name) is not None}
    for name, value in found.items():
        kind = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not abs(value) < _LARGE:
            raise InputError(
                f"{path}: {name} is no number to draw by (got {str(value)[:40]})", fix="Correct or remove it."
            )
    if found.get("top_k", 1) <= 0:  # which stands for all tokens
        del found["top_k"]
    return found


def _vector_lengths(path: Path) -> tuple[int, ...] | None:
    """Read for which lengths of vectors a model was trained, under the names that vLLM reads."""
    stored: Mapping[str, Any] = load_json(path) if path.is_file() else {}
    lengths = stored.get("matryoshka_dimensions")
    if isinstance(lengths, list):
        return tuple(length for length in lengths if isinstance(length, int))
    return None if stored.get("is_matryoshka") is True else ()


def _start_ids(tokenizer_path: Path) -> tuple[int, ...]:
    """Return what the tokenizer itself puts before a text, as those of Llama put `<s>`."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    empty, word = tokenizer.encode("").ids, tokenizer.encode("a").ids
    shared = [a == b for a, b in zip(empty, word, strict=False)]
    return tuple(word[: shared.index(False) if False in shared else len(shared)])
