"""How many bytes of text each token stands for, so that models with different tokenizers can be compared.

A loss per token falls when tokens get shorter; bits per byte do not care how a text was cut. The bytes are
read from the tokenizer's vocabulary, not by decoding, because a token may hold a part of a character. Two
kinds of vocabulary say them exactly: byte-level ones, whose every letter is a byte (GPT-2, Llama 3, Qwen,
Granite), and those of SentencePiece (Llama 2, Mistral), which write a space as U+2581 and a lone byte as
`<0x0A>`. Control tokens, such as the end of a document, are no text: 0 bytes.
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
    """Return the UTF-8 bytes that each id stands for, [vocabulary]; None for a vocabulary of another kind."""
    content = json.loads(tokenizer.content)
    parts = [content.get("pre_tokenizer"), content.get("decoder"), content.get("normalizer")]
    if any(_uses(part, "ByteLevel") for part in parts):
        in_vocabulary = _byte_level_bytes
    elif any(_uses(part, "Metaspace") or _uses(part, "ByteFallback") for part in parts):
        in_vocabulary = _sentencepiece_bytes
    else:
        return None
    sizes = {index: in_vocabulary(text) for text, index in tokenizer.vocabulary().items()}
    for added in content.get("added_tokens") or ():  # written as they are
        sizes[added["id"]] = 0 if added.get("special") else len(added["content"].encode())
    table = np.zeros(tokenizer.vocab_size, np.int64)
    table[list(sizes)] = list(sizes.values())
    return table


def _byte_level_bytes(text: str) -> int:
    return len(text)  # each letter stands for a byte


def _sentencepiece_bytes(text: str) -> int:
    return 1 if _LONE_BYTE.fullmatch(text) else len(text.replace(_SPACE, " ").encode())


def _uses(part: Any, kind: str) -> bool:  # Any: JSON
    """Whether a part of a tokenizer, or a step inside it, is of a kind."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(_uses(value, kind) for value in part.values())
    return isinstance(part, list) and any(_uses(value, kind) for value in part)
