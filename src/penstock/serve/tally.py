"""Counts the tokens of a request while its pieces come, and turns faulty ends into errors."""

from collections.abc import AsyncIterator

from penstock.engine.request import Piece
from penstock.serve.bridge import Answers
from penstock.serve.errors import ApiError
from penstock.serve.schema.generation import PromptTokensDetails, Usage

_FAULTS = {
    "refused": (400, "What the request asks for could not be followed to its end.", "cannot_be_followed"),
    "error": (500, "The answer failed in the engine. The server's log says why.", "engine_error"),
    "deadline": (504, "The answer was not done within the time the server gives a request.", "deadline"),
    "cancelled": (503, "The answer was cancelled, because the server is ending.", "cancelled"),
}


class Tally:
    """Iterates over answers.

    Args:
        answers: not iterated over elsewhere.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._num_drawn = 0
        self._num_cached = 0

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield (index of the answer, piece) until all answers have ended well.

        Raises:
            ApiError: one did not; the others are cancelled.
        """
        num_open = self._answers.num_answers
        async for index, piece in self._answers:
            if piece.finish in _FAULTS:
                self._answers.cancel()
                raise _fault(piece.finish, piece.error)
            self._num_drawn += len(piece.token_ids)
            if piece.finish is not None:
                num_open -= 1
                self._num_cached += piece.num_cached if piece.answer == 0 else 0
            yield index, piece
        if num_open:
            raise _fault("cancelled")

    def usage(self) -> Usage:
        """Return what was counted so far."""
        num_prompt = sum(len(request.prompt) for request in self._answers.requests)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_drawn,
            total_tokens=num_prompt + self._num_drawn,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached),
        )


def _fault(finish: str, reason: str | None = None) -> ApiError:
    status, message, code = _FAULTS[finish]
    return ApiError(status, reason or message, code=code)
