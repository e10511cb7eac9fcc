"""A model with its tokenizer: text in, a stream of text out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import tokenizers
import torch

from penstock.core.config import load_json
from penstock.core.errors import ModelError
from penstock.engine.generate import generate
from penstock.engine.open import open_model
from penstock.engine.sampling import Sampling
from penstock.engine.text_stream import TextStream
from penstock.models.llama.model import Llama
from penstock.text.chat import ChatTemplate, Message, load_template, render
from penstock.text.tokenizer import Tokenizer

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added."""

    text: str
    """May be empty while a character or a stop text is incomplete."""
    token_ids: tuple[int, ...]
    """The token; none in the last piece, which brings what was held back."""
    finish: Finish | None
    """Set in the last piece: an end token or text came, or there was no more room."""


class LLM:
    """A model ready to generate.

    Args:
        model: in evaluation mode.
        stop_ids: tokens that end an answer.
        start_ids: tokens before every prompt but a chat's, whose template writes them.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        stop_ids: frozenset[int] = frozenset(),
        start_ids: Sequence[int] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.start_ids = list(start_ids)
        self.template = template or ChatTemplate()

    @classmethod
    def open(cls, path: Path, *, device: str | None = None) -> Self:
        """Open a Hugging Face folder, a run or a checkpoint.

        Args:
            device: None: the first GPU if there is one, else the CPU.

        Raises:
            ModelError: the model has no tokenizer; otherwise as in `open_model`.
        """
        model, tokenizer_path = open_model(path)
        if tokenizer_path is None:
            raise ModelError(f"{path} has no tokenizer.json", fix="Copy it from where the model came from.")
        tokenizer = Tokenizer.load(tokenizer_path)
        return cls(
            model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")),
            tokenizer,
            stop_ids=_stop_ids(tokenizer_path.parent, tokenizer),
            start_ids=_start_ids(tokenizer_path),
            template=load_template(tokenizer_path.parent),
        )

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, with those that begin every text of this model.

        An empty prompt is the end token: what follows it in training is a new document.
        """
        ids = self.start_ids + self.tokenizer.encode(prompt)
        return ids or [token for token in (self.tokenizer.eos_id,) if token is not None]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids after which the answer to these messages follows."""
        text = render(messages, self.template)
        if self.template.source is None:
            return self.encode(text)
        return self.tokenizer.encode(text, special=True)

    def stream(
        self,
        prompt: Sequence[int],
        *,
        sampling: Sampling,
        max_tokens: int | None = None,
        stop_texts: Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Yield the answer as it is generated; arguments and errors as in `generate`."""
        tokens = generate(
            self.model, prompt, sampling=sampling, max_tokens=max_tokens, stop_ids=self.stop_ids
        )
        return self._pieces(tokens, TextStream(self.tokenizer.decode, stop_texts=stop_texts))

    def _pieces(self, tokens: Iterator[int], stream: TextStream) -> Iterator[Piece]:
        finish: Finish = "length"
        for token in tokens:
            if token in self.stop_ids:
                finish = "stop"
                break
            yield Piece(stream.push(token), (token,), None)
            if stream.stopped:
                finish = "stop"
                break
        yield Piece(stream.close(), (), finish)


def _stop_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Collect the end tokens that the tokenizer, `generation_config.json` and `config.json` name."""
    found = {tokenizer.eos_id}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            stored: Any = load_json(folder / name).get("eos_token_id")  # an id or a list of ids
            found.update(stored if isinstance(stored, list) else [stored])
    return frozenset(token for token in found if isinstance(token, int))


def _start_ids(tokenizer_path: Path) -> list[int]:
    """Return what the tokenizer itself puts before a text, as those of Llama put `<s>`."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    empty, word = tokenizer.encode("").ids, tokenizer.encode("a").ids
    shared = [a == b for a, b in zip(empty, word, strict=False)]
    return list(word[: shared.index(False) if False in shared else len(shared)])
