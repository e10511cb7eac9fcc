"""Spellings of dtypes: PyTorch's is the one that Penstock shows, and the usual short ones are read as it."""

import re
from collections.abc import Container

_SHORT = {
    "bf16": "bfloat16",
    "bfloat": "bfloat16",
    "fp8": "float8",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "long": "int64",
}
_WORD = re.compile("[a-z0-9]+", re.IGNORECASE)


def dtype_name(text: str) -> str:
    """Return PyTorch's spelling of a dtype, or of a value that begins with one; other texts as they are.

    >>> dtype_name("bf16"), dtype_name("FP32"), dtype_name("torch.bfloat16"), dtype_name("bf16_master")
    ('bfloat16', 'float32', 'bfloat16', 'bfloat16_master')
    >>> dtype_name("float32"), dtype_name("auto")
    ('float32', 'auto')
    """
    plain = text.strip().removeprefix("torch.")
    word = _WORD.match(plain)
    if word is None:
        return text
    lower = word[0].lower()
    if lower in _SHORT:
        return _SHORT[lower] + plain[word.end() :]
    return plain.lower() if lower in _SHORT.values() else text


def choice_of(text: str, choices: Container[object]) -> str:
    """Return the choice that a text is, or spells as a dtype; the text as it is if there is none.

    >>> choice_of("bf16", ("bfloat16", "auto")), choice_of("fp16", ("bfloat16", "auto"))
    ('bfloat16', 'fp16')
    """
    name = dtype_name(text)
    return name if text not in choices and name in choices else text
