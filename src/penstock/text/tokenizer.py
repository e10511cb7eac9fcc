"""Tokenizers: load one from tokenizer.json, train one, turn text into ids and back.

The work is done by Hugging Face's `tokenizers` library; this file fixes what it leaves open. Text
is text: the characters `<|endoftext|>` inside a document are encoded as characters, never as the
control token, so a document cannot end itself. A truncation or padding rule stored in
tokenizer.json is switched off, because it would drop tokens without a word. Nothing is added around a text
either: the caller decides where documents end.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.core.errors import InputError, UsageError
from penstock.core.files import write_atomic
from penstock.core.units import mib
from penstock.text.encoding import ids_of
from penstock.text.guard import Guard

T = TypeVar("T")

EOS = "<|endoftext|>"
"""The end-of-document token of the tokenizers trained here; always id 0."""

_DEEPSEEK_EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"

KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", _DEEPSEEK_EOS, "<|im_end|>")
"""Names under which tokenizers of others store their end token, most telling first."""

MAX_FILE_BYTES = 128 * 2**20
"""The largest tokenizer.json that is read; those of 256,000 entries are about 35 MB."""

MIN_VOCAB = 257
"""256 bytes and the end token: with fewer, some text could not be encoded."""


class Tokenizer:
    """A tokenizer, immutable; safe to share between threads.

    Args:
        content: the bytes of a tokenizer.json.

    Raises:
        InputError: the content is not a tokenizer.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        """The bytes of its tokenizer.json."""
        self._plain = _parse(content)
        self._plain.encode_special_tokens = True
        vocab = self._plain.get_vocab(with_added_tokens=True)
        if not vocab:
            raise InputError("Not a tokenizer (its vocabulary is empty)")
        self.vocab_size: int = max(vocab.values()) + 1
        """One more than the largest id; ids need not be contiguous."""
        self.eos_id: int | None = next((vocab[name] for name in KNOWN_EOS if name in vocab), None)
        """The end-of-document token, or None where the tokenizer has none of KNOWN_EOS."""
        self.fingerprint: str = hashlib.blake2b(content, digest_size=32).hexdigest()
        """BLAKE2b-256 of the file, hex."""

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a tokenizer.json.

        Raises:
            InputError: it is missing, too large, or not a tokenizer.
        """
        remedy = "Give the tokenizer.json of a model, or train one with `penstock data prepare`."
        if not path.is_file():
            raise InputError(f"Tokenizer {path} does not exist", fix=remedy)
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise InputError(
                f"{path} has {mib(size)}; a tokenizer has at most {mib(MAX_FILE_BYTES)}", fix=remedy
            )
        try:
            return cls(path.read_bytes())
        except InputError as error:
            raise InputError(f"{path}: {str(error).rstrip('.')}", fix=remedy) from None

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each entry, as the vocabulary spells it; added tokens are among them."""
        found: dict[str, int] = self._plain.get_vocab(with_added_tokens=True)
        return found

    def save(self, path: Path) -> None:
        """Write the tokenizer durably, byte for byte as it was loaded."""
        write_atomic(path, self.content)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            special: let the names of special tokens inside the text stand for those tokens; for
                chat templates, never for documents.

        Raises:
            UsageError: half of a surrogate pair is in it, which Python's texts can hold.
        """
        try:
            return self._guard.encode(text) if special else ids_of(text, self._plain)
        except TypeError:  # which the library raises of all that is not UTF-8
            half = next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None)
            if half is None:
                raise
            fix = "Decode its bytes with errors='replace'."
            raise UsageError("The text has half of a surrogate pair", got=half, fix=fix) from None

    def guarded(self, value: T) -> T:
        """Return texts, or JSON with texts inside, whose special names are text to `encode(special=True)`.

        Raises:
            UsageError: it is nested too deeply.
        """
        return self._guard.guarded(value)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, computed on all cores; other threads run meanwhile."""
        return [encoding.ids for encoding in self._plain.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD, unknown ids nothing.

        Args:
            special: keep the names of special tokens; otherwise they are left out.
        """
        text: str = self._plain.decode(list(ids), skip_special_tokens=not special)
        return text

    @cached_property
    def _guard(self) -> Guard:
        # A second copy, because the switch is a property of the library's object, which threads share.
        return Guard(_parse(self.content))


def _parse(content: bytes) -> tokenizers.Tokenizer:
    try:
        parsed = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception for any malformed file
        raise InputError(f"Not a tokenizer ({error})") from None
    parsed.no_truncation()
    parsed.no_padding()
    return parsed


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, min_frequency: int = 2) -> Tokenizer:
    """Train a byte-level BPE tokenizer; the same texts give the same bytes, whatever the machine.

    Id 0 is EOS, then the 256 bytes, then merges. Splitting before merging follows GPT-2 (Radford et
    al., 2019), so decoding restores every text exactly. Memory grows with the distinct words.

    Args:
        vocab_size: entries wanted, at least 257; a small text yields fewer.
        min_frequency: how often a pair must occur to be merged.

    Raises:
        UsageError: the vocabulary cannot hold the 256 bytes.
    """
    if vocab_size < MIN_VOCAB:
        fix = f"Use at least {MIN_VOCAB}: the 256 bytes and {EOS}."
        raise UsageError("The vocabulary is too small", got=vocab_size, fix=fix)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[EOS],
        # Sorted, because the library hands out the alphabet in no particular order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer.to_str().encode())
