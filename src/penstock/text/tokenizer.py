"""Tokenizers: load one from tokenizer.json, train one, convert text to ids and back.

Hugging Face's `tokenizers` library does the work; this file sets what it leaves open. The characters
`<|endoftext|>` inside a document are encoded as characters, never as the control token, so a document cannot
end itself. A truncation or padding rule stored in tokenizer.json is disabled, because it would drop tokens
silently. No token is added around a text: the caller decides where documents end.
"""

import hashlib
import json
import unicodedata
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.core.errors import InputError, PackageMissing, UsageError
from penstock.core.files import write_atomic
from penstock.core.packages import Package
from penstock.core.units import mib
from penstock.text.safe_cuts import SafeCuts, safe_cuts
from penstock.text.special_tokens import SpecialTokenGuard, ids_of, is_of_library, panic_of

if TYPE_CHECKING:
    import tokenizers
else:
    tokenizers = Package("tokenizers", "Tokenizers")

T = TypeVar("T")
UnicodeForm = Literal["NFC", "NFD", "NFKC", "NFKD"]

EOS = "<|endoftext|>"
"""End-of-document token of tokenizers trained here; always id 0."""

_DEEPSEEK_EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"

KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", _DEEPSEEK_EOS, "<|im_end|>")
"""Names of the end token in tokenizers of others, most specific first."""

MAX_FILE_BYTES = 128 * 2**20
"""Largest tokenizer.json that is read; those with 256,000 entries are about 35 MB."""

MAX_IDS = 2**24
"""Most token ids: what grammars are compiled with has a place for each id up to the largest."""

MIN_VOCAB = 257
"""Minimum vocabulary: 256 bytes and the end token; with fewer, some text could not be encoded."""


class Tokenizer:
    """Immutable tokenizer; thread-safe.

    Args:
        content: bytes of a tokenizer.json.

    Raises:
        InputError: the content is not a tokenizer.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        """Bytes of its tokenizer.json."""
        self._plain = _parse(content)
        self._plain.encode_special_tokens = True
        vocab = self._plain.get_vocab(with_added_tokens=True)
        if not vocab:
            raise InputError("Not a tokenizer (its vocabulary is empty)")
        self.vocab_size: int = max(vocab.values()) + 1
        """Largest id plus one; ids need not be contiguous."""
        if self.vocab_size > MAX_IDS:
            raise InputError(
                f"Not a tokenizer (it has a token id above {MAX_IDS:,}: {self.vocab_size - 1:,})"
            )
        self.eos_id: int | None = next((vocab[name] for name in KNOWN_EOS if name in vocab), None)
        """End-of-document token; None if the tokenizer has none of KNOWN_EOS."""
        added = self._plain.get_added_tokens_decoder()
        self.added: dict[str, int] = {token.content: index for index, token in added.items()}
        """Ids of the tokens added to the vocabulary, special ones and others, by name."""
        self.fingerprint: str = hashlib.blake2b(content, digest_size=32).hexdigest()
        """BLAKE2b-256 of the file, hex."""

    @classmethod
    def load(cls, path: str | Path, *, known: Iterable["Tokenizer"] = ()) -> "Tokenizer":
        """Read a tokenizer.json.

        Args:
            known: tokenizers that are there already; the one that is equal is returned instead of another
                copy.

        Raises:
            InputError: it is missing, too large, or not a tokenizer.
        """
        path = Path(path)
        remedy = "Give the tokenizer.json of a model, or train one with `penstock data prepare`."
        if not path.is_file():
            raise InputError(f"Tokenizer {path} does not exist", fix=remedy)
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise InputError(
                f"{path} has {mib(size)}; a tokenizer has at most {mib(MAX_FILE_BYTES)}", fix=remedy
            )
        content, known = path.read_bytes(), list(known)
        for one in known:
            if one.content == content:
                return one
        try:
            found = cls(content)
        except InputError as error:
            raise InputError(f"{path}: {str(error).rstrip('.')}", fix=remedy) from None
        return next((one for one in known if one._identity == found._identity), found)

    def id_of(self, name: str) -> int | None:
        """Return the id of an entry by its spelling in the vocabulary."""
        found: int | None = self._plain.token_to_id(name)
        return found

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each entry by its spelling in the vocabulary, added tokens included."""
        found: dict[str, int] = self._plain.get_vocab(with_added_tokens=True)
        return found

    def extends(self, other: "Tokenizer") -> bool:
        """Return True if it cuts text as `other` does, with the same ids, but for tokens added to it."""
        if self.fingerprint == other.fingerprint:
            return True
        ours, theirs = (json.loads(one._plain.to_str()) for one in (self, other))
        rules = ("model", "normalizer", "pre_tokenizer")
        return all(ours[rule] == theirs[rule] for rule in rules) and other.added.items() <= self.added.items()

    def save(self, path: Path) -> None:
        """Write the tokenizer durably, byte for byte as it was loaded."""
        write_atomic(path, self.content)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            special: True to convert names of special tokens to those tokens; for chat templates, never for
                documents.

        Raises:
            UsageError: the text contains half of a surrogate pair.
        """
        try:
            return self._guard.encode(text) if special else ids_of(text, self._plain)
        except TypeError:  # raised by the library for text that is not valid UTF-8
            half = next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None)
            if half is None:
                raise
            fix = "Decode its bytes with errors='replace'."
            raise UsageError("The text has half of a surrogate pair", got=half, fix=fix) from None

    def guarded(self, value: T) -> T:
        """Return texts, or JSON with texts inside, with special names guarded from `encode(special=True)`.

        Raises:
            UsageError: it is nested too deeply.
        """
        return self._guard.guarded(value)

    @property
    def control_names(self) -> list[str]:
        """Names of the tokens that structure a conversation."""
        return self._guard.names

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of those tokens."""
        vocabulary = self.vocabulary()
        return frozenset(vocabulary[name] for name in self.control_names)

    def encode_rendered_batch(
        self, texts: Sequence[str]
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Return the ids [n] and the characters [n, 2] of each token of rendered conversations.

        Names of special tokens stand for them, as in `encode(special=True)`; computed on all cores.
        """
        return self._guard.encode_batch_with_offsets(texts)

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[np.uint32]]:
        """Return the ids of each text, computed on all cores; other threads run meanwhile.

        Token offsets are not computed. The library returns ids as a list of numbers, which `array` reads
        three times as fast as numpy does.

        Raises:
            ModelError: the library panicked.
        """
        try:
            found = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:  # a panic of the Rust library is no Exception
            raise panic_of(error) from None
        return [np.asarray(array("I", encoding.ids)) for encoding in found]

    def encode_special_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text as `encode(text, special=True)` does, computed on all cores.

        Raises:
            UsageError: a text contains half of a surrogate pair.
        """
        try:
            return self._guard.encode_batch(texts)
        except TypeError:
            return [self.encode(text, special=True) for text in texts]  # which names the fault

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD, unknown ids are ignored.

        Args:
            special: True to keep the names of special tokens; False: they are left out.
        """
        try:
            text: str = self._plain.decode(list(ids), skip_special_tokens=not special)
        except BaseException as error:  # a panic of the Rust library is no Exception
            raise panic_of(error) from None
        return text

    def spelled(self, ids: Sequence[int]) -> list[str]:
        """Return the spelling of each id in the vocabulary; "" for unknown ids."""
        return [self._plain.id_to_token(token) or "" for token in ids]

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Return True if a text certainly has more than `num_tokens` tokens, without encoding it."""
        most = (self.longest_token_bytes or 0) * num_tokens
        if most == 0 or 4 * len(text) <= most or _num_bytes(text) <= most:
            return False
        for form in self._forms or ():
            text = unicodedata.normalize(form, text)
        return _num_bytes(text) > most

    @cached_property
    def safe_cuts(self) -> SafeCuts | None:
        """Places at which `encode_batch` may be given a text in pieces; None: it has none."""
        normalizer = self._plain.normalizer
        return safe_cuts(json.loads(self._plain.to_str()), normalizer.normalize_str if normalizer else str)

    @property
    def start_ids(self) -> tuple[int, ...]:
        """Tokens that its post-processor puts before a text, such as Llama's `<s>`; raises as `end_ids`."""
        return self._added_ids[0]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that its post-processor puts after a text, such as Qwen3-Embedding's `<|endoftext|>`.

        Raises:
            InputError: it fails on any text.
        """
        return self._added_ids[1]

    @cached_property
    def _added_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        try:
            found = self._plain.encode("a")
        except BaseException as error:
            if not is_of_library(error):
                raise
            raise InputError(f"Not a tokenizer (it fails on any text: {error})") from None
        ids, is_added = found.ids, found.special_tokens_mask
        before = is_added.index(0) if 0 in is_added else len(ids)
        after = is_added[::-1].index(0) if 0 in is_added else 0
        return tuple(ids[:before]), tuple(ids[len(ids) - after :])

    @cached_property
    def _identity(self) -> bytes:
        """Hash of all that decides how it cuts text; files that were written in other ways share it."""
        return hashlib.blake2b(self._plain.to_str().encode(), digest_size=32).digest()

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """Maximum bytes of normalised text per token; None if unbounded.

        Known for byte-level vocabularies and for SentencePiece's with byte fallback: the unknown token of
        other kinds represents whole words.
        """
        content = json.loads(self.content)
        is_byte_level = "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
        has_bytes = is_byte_level or (content.get("model") or {}).get("byte_fallback")
        strips = any(one.get("lstrip") or one.get("rstrip") for one in content.get("added_tokens") or ())
        if strips or not has_bytes or self._forms is None:
            return None
        names = self.vocabulary()
        if is_byte_level:  # each letter of an entry is a byte
            return max(len(name.encode()) if name in self.added else len(name) for name in names)
        return max(len(name.encode()) for name in names)

    @cached_property
    def _forms(self) -> list[UnicodeForm] | None:
        return _unicode_forms(json.loads(self.content).get("normalizer"))

    @cached_property
    def _guard(self) -> SpecialTokenGuard:
        # A second copy, because the switch is an attribute of the library's object, which threads share.
        return SpecialTokenGuard(_parse(self.content))


_UNICODE_FORMS: Mapping[str, UnicodeForm] = {"NFC": "NFC", "NFD": "NFD", "NFKC": "NFKC", "NFKD": "NFKD"}


def _unicode_forms(normalizer: dict[str, Any] | None) -> list[UnicodeForm] | None:  # Any: JSON
    """Return the Unicode forms that a normalizer applies; None if it may shorten text in other ways."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return []
    if normalizer["type"] == "Replace":
        return [] if normalizer.get("pattern") == {"String": " "} and normalizer.get("content") else None
    if normalizer["type"] == "Sequence":
        each = [_unicode_forms(one) for one in normalizer["normalizers"]]
        return None if None in each else [form for forms in each for form in forms or ()]
    form = _UNICODE_FORMS.get(normalizer["type"])
    return None if form is None else [form]


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _parse(content: bytes) -> "tokenizers.Tokenizer":
    try:
        parsed = tokenizers.Tokenizer.from_str(content.decode())
    except PackageMissing:
        raise
    except BaseException as error:
        if not is_of_library(error):
            raise
        raise InputError(f"Not a tokenizer ({error})") from None
    parsed.no_truncation()
    parsed.no_padding()
    return parsed


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; the same texts give the same bytes on any machine.

    Id 0 is EOS, then the 256 bytes, then merges. Pre-tokenization follows GPT-2 (Radford et al., 2019), so
    decoding restores every text exactly. Memory grows with the number of distinct words.

    Args:
        vocab_size: entries wanted, from 257 to 2**24; a small text yields fewer.

    Raises:
        UsageError: the vocabulary cannot contain the 256 bytes, or is too large.
    """
    if vocab_size < MIN_VOCAB:
        fix = f"Use at least {MIN_VOCAB}: the 256 bytes and {EOS}."
        raise UsageError("The vocabulary is too small", got=vocab_size, fix=fix)
    if vocab_size > MAX_IDS:  # the library takes memory for all of it at once
        raise UsageError("The vocabulary is too large", got=vocab_size, fix=f"Use at most {MAX_IDS:,}.")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        # Sorted, because the library returns the alphabet in arbitrary order.
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer.to_str().encode())
