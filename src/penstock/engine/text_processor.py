"""Text processor of a model folder: tokenizer, special tokens, chat template.

An adapter has one too. What its folder lacks is the model's: a tokenizer with tokens of its own, the chat
template that it was tuned with, and the tokens at which its answers end, besides the model's.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from penstock.core.config import load_json
from penstock.core.errors import InputError, UsageError
from penstock.core.files import TOKENIZER_FILE
from penstock.core.log import EventLog
from penstock.engine.detokenizer import TextStream
from penstock.engine.embedding_rules import EmbeddingRules, read_rules
from penstock.engine.sampling_params import Sampling
from penstock.text.chat_template import ChatTemplate, Message, load_template, render
from penstock.text.companions import model_end_ids
from penstock.text.template_markers import markers_in, may_be_text
from penstock.text.tokenizer import Tokenizer

log = EventLog(__name__)

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_LARGE = 1e9
_CODE = re.compile(r"""[{}'"+]""")
"""Characters of a template's code. No marker has one."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextProcessor:
    """Tokenizer, special tokens and chat template of a model or an adapter; safe to share between threads."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int] = frozenset()
    """End tokens of an answer."""
    adapters: dict[str, "TextProcessor"] = field(default_factory=dict)
    """Text processors of the model's present adapters, by name."""
    start_ids: tuple[int, ...] = ()
    """Tokens before every prompt; chat templates write their own."""
    end_ids: tuple[int, ...] = ()
    """Tokens after every embedded text."""
    template: ChatTemplate = field(default_factory=ChatTemplate)
    """Chat template."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The authors' sampling defaults from `generation_config.json` (`temperature`, `top_k` ...)."""
    trust_contents: bool = False
    """True: names of special tokens in messages become those tokens, as in transformers; False: they are
    text, because the author of a message could otherwise write other turns."""
    embedding: EmbeddingRules = field(default_factory=EmbeddingRules)
    """Rules of embeddings."""
    _singles: dict[int, str] = field(default_factory=dict)
    """Cache of single tokens' texts."""

    @property
    def default_sampling(self) -> Sampling:
        """Sampling of requests that name none: that of the model's authors, else temperature 1.

        Raises:
            UsageError: the authors' values are out of range.
        """
        try:
            return Sampling(**self.sampling)  # type: ignore[arg-type]
        except UsageError as error:
            fix = "Correct that file. `penstock serve --api-sampling` does without it."
            raise UsageError(f"generation_config.json: {str(error).rstrip('.')}", fix=fix) from None

    @classmethod
    def load(cls, tokenizer_path: Path, *, trust_contents: bool = False) -> Self:
        """Load tokenizer.json and the files beside it.

        Raises:
            InputError, ModelError: one of the files cannot be read.
        """
        tokenizer, template = Tokenizer.load(tokenizer_path), load_template(tokenizer_path.parent)
        start_ids, end_ids = _added_ids(tokenizer, tokenizer_path)
        _look_for_markers(tokenizer_path.parent, tokenizer, template)
        return cls(
            tokenizer=tokenizer,
            stop_ids=_stop_ids(tokenizer_path.parent, tokenizer, template),
            start_ids=start_ids,
            end_ids=end_ids,
            template=template,
            trust_contents=trust_contents,
            sampling=_sampling(tokenizer_path.parent / "generation_config.json"),
            embedding=read_rules(tokenizer_path.parent),
        )

    def of(self, adapter: str | None) -> "TextProcessor":
        """Return the text processor of an adapter; this one for None, and for names that are unknown."""
        return self if adapter is None else self.adapters.get(adapter, self)

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt, with the model's start tokens.

        An empty prompt becomes the end token: in training a new document follows it.
        """
        ids = [*self.start_ids, *self.tokenizer.encode(prompt)]
        return ids or [token for token in (self.tokenizer.eos_id,) if token is not None]

    def encode_embedded(self, text: str, *, keep: Callable[[list[int]], Sequence[int]] = list) -> list[int]:
        """Return the token ids of a text to embed: those of sentence-transformers.

        The folder's default prompt and the text, between the tokens that the tokenizer's post-processor adds.
        A name of a special token in the text stays text.

        Args:
            keep: truncates the ids that are not added by the post-processor.
        """
        ids = keep(self.tokenizer.encode(self.embedding.prompt + text))
        found = [*self.start_ids, *ids, *self.end_ids]
        return found or [token for token in (self.tokenizer.eos_id,) if token is not None]

    def encode_chat(self, messages: Sequence[Message], *, tools: Sequence[object] = ()) -> list[int]:
        """Return the token ids of a conversation, ready for the answer.

        Args:
            tools: functions that the model may call, as JSON.

        Raises:
            UsageError: the template refuses these messages.
            ModelError: the template is not valid.
        """
        return self.encode_rendered(render(self.guarded(messages), self.template, tools=self.guarded(tools)))

    def add_adapter(self, name: str, folder: Path) -> None:
        """Add the text processor of an adapter; raises as `read_adapter` does."""
        self.adapters[name] = self.read_adapter(folder)

    def read_adapter(self, folder: Path) -> "TextProcessor":
        """Return the text processor of an adapter, which is not added.

        Raises:
            InputError, UsageError, ModelError: a file of the folder cannot be read.
        """
        path, template = folder / TOKENIZER_FILE, load_template(folder)
        present, has_own = (self, *self.adapters.values()), path.is_file() or template.source is not None
        known = [one.tokenizer for one in present]
        tokenizer = Tokenizer.load(path, known=known) if path.is_file() else self.tokenizer
        alike = next((one for one in present if one.tokenizer is tokenizer), None)
        start_ids, end_ids = (
            _added_ids(tokenizer, path) if alike is None else (alike.start_ids, alike.end_ids)
        )
        variables = {**self.template.variables, **template.variables}
        template = replace(self.template if template.source is None else template, variables=variables)
        if has_own:
            _look_for_markers(folder, tokenizer, template)
        return replace(
            self,
            tokenizer=tokenizer,
            stop_ids=self.stop_ids | _stop_ids(folder, tokenizer, template),
            adapters={},
            start_ids=start_ids,
            end_ids=end_ids,
            template=template,
            _singles={} if alike is None else alike._singles,
        )

    def names_without_rows(self, vocab_size: int) -> list[str]:
        """Return the special tokens that the chat template names, but whose ids are beyond the vocabulary."""
        source = self.template.source or ""
        return [
            name for name, token in self.tokenizer.added.items() if token >= vocab_size and name in source
        ]

    def remove_adapter(self, name: str) -> None:
        """Undo `add_adapter`."""
        del self.adapters[name]

    def guarded(self, given: T) -> T:
        """Return input of a client for the chat template, with special tokens escaped unless trusted.

        Raises:
            UsageError: it is nested too deeply.
        """
        if self.template.source is None or self.trust_contents:
            return given
        return self.tokenizer.guarded(given)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a rendered conversation."""
        return (
            self.encode(text) if self.template.source is None else self.tokenizer.encode(text, special=True)
        )

    def stream(self, stop_texts: Sequence[str] = (), *, shown: Collection[int] = ()) -> TextStream:
        """Return a detokenizer for one answer.

        Args:
            shown: special tokens whose names appear in the text; others do not.
        """
        names = {token: self.tokenizer.decode([token], special=True) for token in shown}
        return TextStream(self._decode, stop_texts=stop_texts, shown=names)

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; single tokens are cached, as streams decode one at a time."""
        if len(ids) != 1:
            return self.tokenizer.decode(ids)
        text = self._singles.get(ids[0])
        if text is None:
            text = self._singles[ids[0]] = self.tokenizer.decode(ids)
        return text


def _look_for_markers(folder: Path, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Log markers of a chat template that the model never sees as such: the vocabulary lacks them."""
    source = f"{template.source or ''} {template.tool_source or ''}"
    named = [text for name, text in template.variables.items() if name in source]
    written = (found[0] for found in markers_in(source) if not _CODE.search(found[0]))
    markers = dict.fromkeys((*named, *written))
    if lacking := [
        marker
        for marker in markers
        if not may_be_text(marker) and len(tokenizer.encode(marker, special=True)) > 1
    ]:
        log.warning(
            "markers_in_pieces",
            "The vocabulary of {folder} lacks tokens that its chat template names ({markers}), so the "
            "model reads them as text: use the tokenizer and the template of one model",
            folder=str(folder),
            markers=", ".join(lacking),
        )


def _stop_ids(folder: Path, tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """Collect the end tokens named by the tokenizer, its config, generation_config.json and config.json."""
    named = template.variables.get("eos_token", "")
    found: list[Any] = [tokenizer.eos_id, tokenizer.id_of(named)]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            stored = model_end_ids(load_json(folder / name))  # an id or a list of ids
            found += stored if isinstance(stored, list) else [stored]
    return frozenset(token for token in found if isinstance(token, int) and token >= 0)  # -1 means none


def _sampling(path: Path) -> dict[str, float]:
    """Read the sampling defaults that come with a model; null entries are left out."""
    stored: Mapping[str, Any] = load_json(path) if path.is_file() else {}
    found = {name: stored[name] for name in _SAMPLING if stored.get(name) is not None}
    for name, value in found.items():
        kind = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not abs(value) < _LARGE:
            raise InputError(
                f"{path}: {name} is not a valid number (got {str(value)[:40]})", fix="Correct or remove it."
            )
    if found.get("top_k", 1) <= 0:  # means all tokens
        del found["top_k"]
    return found


def _added_ids(tokenizer: Tokenizer, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before and after a text."""
    try:
        return tokenizer.start_ids, tokenizer.end_ids
    except InputError as error:
        raise InputError(
            f"{path}: {str(error).rstrip('.')}", fix="Restore it from the folder it came from."
        ) from None
