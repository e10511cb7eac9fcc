"""A text to ids, during which other threads run: streams of a server go on while a long prompt is read."""

import tokenizers

_LONG = 1000
"""Characters, which take a millisecond or two."""


def ids_of(text: str, tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Return the ids of a text, with nothing added around it.

    The library lets go of the interpreter for a batch only. A short text is no batch: the library remembers
    one, and then complains in every forked process.
    """
    if len(text) < _LONG:
        found = tokenizer.encode(text, add_special_tokens=False)
    else:
        [found] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = found.ids
    return ids
