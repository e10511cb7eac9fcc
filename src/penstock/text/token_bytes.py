"""Bytes per token: the text that each token represents, for losses comparable between tokenizers.

A loss per token falls when tokens get shorter; bits per byte do not depend on the tokenizer. The bytes are
read from the vocabulary, not by decoding, because a token may be part of a character. Two kinds of vocabulary
give them exactly: byte-level ones, whose letters are bytes (GPT-2, Llama 3, Qwen, Granite), and SentencePiece
(Llama 2, Mistral), which writes a space as U+2581 and a single byte as `<0x0A>`. Control tokens, such as the
end of a document, have 0 bytes.
"""

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.text.tokenizer import Tokenizer

_SPACE = "\u2581"
_LONE_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def token_bytes(tokenizer: Tokenizer) -> npt.NDArray[np.int64] | None:
    """Return the UTF-8 bytes per id, [vocabulary] int64; None for another kind of vocabulary."""
    spelled = spellings(tokenizer)
    if spelled is None:
        return None
    table = np.zeros(tokenizer.vocab_size, np.int64)
    table[list(spelled)] = list(map(len, spelled.values()))
    return table


def spellings(tokenizer: Tokenizer) -> dict[int, bytes] | None:
    """Return the text bytes of each id; None for another kind of vocabulary."""
    content = json.loads(tokenizer.content)
    parts = [content.get("pre_tokenizer"), content.get("decoder"), content.get("normalizer")]
    if any(_uses(part, "ByteLevel") for part in parts):
        spell = _byte_level
    elif any(_uses(part, "Metaspace") or _uses(part, "ByteFallback") for part in parts):
        spell = _sentencepiece
    else:
        return None
    added = content.get("added_tokens") or ()  # spelled literally
    written = {one["id"]: b"" if one.get("special") else one["content"].encode() for one in added}
    vocabulary = tokenizer.vocabulary().items()
    return {index: written[index] if index in written else spell(text) for text, index in vocabulary}


def _byte_level(text: str) -> bytes:
    return bytes(_BYTE_OF.get(letter, 0x3F) for letter in text)


def _sentencepiece(text: str) -> bytes:
    return bytes([int(text[3:5], 16)]) if _LONE_BYTE.fullmatch(text) else text.replace(_SPACE, " ").encode()


def _letters() -> dict[str, int]:
    """Return the byte of each letter of GPT-2's alphabet: visible ones as they are, others from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _letters()


def _uses(part: Any, kind: str) -> bool:  # Any: JSON
    """Return True if a part of a tokenizer, or a step within it, is of a kind."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(_uses(value, kind) for value in part.values())
    return isinstance(part, list) and any(_uses(value, kind) for value in part)
