"""Answers put together from their pieces; no torch."""

from dataclasses import dataclass

from penstock.engine.request import Finish, Piece, Request, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One whole answer."""

    text: str
    """Without the end token or stop text that ended it."""
    token_ids: tuple[int, ...]
    """Without the end token; those of a stop text are among them."""
    finish: Finish
    """Why it ended."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token where they were asked for."""
    embedding: tuple[float, ...] | None = None
    """Of an "embed" task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """All answers to one prompt."""

    prompt: tuple[int, ...]
    """Its tokens."""
    answers: tuple[Answer, ...]
    """As many as were asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per token of the prompt, None for its first, where they were asked for."""
    num_cached: int = 0
    """Tokens of the prompt that were found computed for the first answer."""

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first answer."""
        return self.answers[0].token_ids


class Collected:
    """The pieces of one request so far."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._pieces: list[list[Piece]] = [[] for _ in range(request.num_answers)]

    def take(self, piece: Piece) -> None:
        """Add a piece."""
        self._pieces[piece.answer].append(piece)

    def answers(self) -> Answers:
        """Return the whole, once every answer has its last piece."""
        told = [piece.prompt_logprobs for pieces in self._pieces for piece in pieces]
        return Answers(
            prompt=self._request.prompt,
            answers=tuple(_joined(pieces) for pieces in self._pieces),
            prompt_logprobs=next((found for found in told if found is not None), None),
            num_cached=self._pieces[0][-1].num_cached,
        )


def _joined(pieces: list[Piece]) -> Answer:
    finish = pieces[-1].finish
    assert finish is not None, pieces
    return Answer(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        finish=finish,
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        embedding=pieces[-1].embedding,
    )
