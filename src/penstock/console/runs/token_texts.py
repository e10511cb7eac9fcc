"""Texts of single tokens that join to the text of a document."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from penstock.engine.detokenizer import TextStream
from penstock.text.tokenizer import Tokenizer

Piece = tuple[str, bool, float | None]
"""Text, whether it is learned, its loss in nats."""


def token_texts(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; that of a character of several tokens comes with its last one.

    Special tokens have their names. Without a tokenizer, tokens are numbers.
    """
    if tokenizer is None:
        return [f"{token} " for token in ids]
    stream = TextStream(lambda some: tokenizer.decode(some, special=True))
    texts = [stream.push(token) for token in ids]
    if texts:
        texts[-1] += stream.close()
    return texts


def pieces_of(
    texts: Sequence[str], is_learned: Sequence[bool], losses: Sequence[float | None] | None
) -> list[Piece]:
    """Return one piece a token with losses, or else one for each stretch of equally learned tokens.

    >>> pieces_of(["a", "b", "c"], [False, True, True], None)
    [('a', False, None), ('bc', True, None)]
    """
    if losses is not None:
        return [(text, learned, loss) for text, learned, loss in zip(texts, is_learned, losses, strict=True)]
    return [*_stretches(texts, is_learned)]


def _stretches(texts: Sequence[str], is_learned: Sequence[bool]) -> Iterator[Piece]:
    for learned, some in groupby(zip(texts, is_learned, strict=True), key=lambda one: one[1]):
        yield "".join(text for text, _ in some), learned, None
