"""One answer being written: drawn tokens to text, until something ends it."""

from dataclasses import dataclass

from penstock.engine.request import Finish, Piece, TokenLogprob
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.text_stream import TextStream


@dataclass(slots=True, kw_only=True)  # not frozen: one is made per token, and freezing doubles its price
class Drawn:
    """What was drawn for one share."""

    tokens: tuple[int, ...] = ()
    """One and the accepted drafts; none where a prompt is not done, or only its embedding is wanted."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token where they were asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """When the prompt is done, where they were asked for."""
    embedding: tuple[float, ...] | None = None
    """When the prompt is done, of an "embed" task."""
    error: str | None = None
    """Why no token can be drawn."""
    is_refused: bool = False
    """Whether that is the request's own doing."""


class OpenAnswer:
    """What was told of one sequence so far.

    Args:
        stream: decodes its tokens, and knows the stop texts; None: an engine without a tokenizer.
    """

    def __init__(self, sequence: Sequence, stream: TextStream | None) -> None:
        self.sequence = sequence
        self._request = sequence.request
        self._stream = stream
        self._num_tokens = 0

    def take(self, drawn: Drawn) -> Piece | None:
        """Return what a step added, with `finish` set if that was the end; None: nothing to tell yet."""
        if drawn.error is not None:
            return self.end("refused" if drawn.is_refused else "error", error=drawn.error)
        if drawn.embedding is not None:
            return self.end("stop", embedding=drawn.embedding)
        if not drawn.tokens:
            return None
        texts, num_kept, finish = self._written(drawn.tokens)
        return Piece(
            request_id=self.sequence.request_id,
            answer=self.sequence.answer,
            text=texts[0] if len(texts) == 1 else "".join(texts),
            token_ids=drawn.tokens[:num_kept],
            logprobs=drawn.logprobs[:num_kept],
            prompt_logprobs=drawn.prompt_logprobs,
            finish=finish,
            num_cached=self.sequence.num_cached if finish else 0,
        )

    def end(
        self, finish: Finish, *, error: str | None = None, embedding: tuple[float, ...] | None = None
    ) -> Piece:
        """Return the last piece of an answer that something else than its tokens ended."""
        return Piece(
            request_id=self.sequence.request_id,
            answer=self.sequence.answer,
            text=self._rest(),
            embedding=embedding,
            finish=finish,
            error=error,
            num_cached=self.sequence.num_cached,
        )

    def _written(self, tokens: tuple[int, ...]) -> tuple[list[str], int, Finish | None]:
        """Write tokens until the answer ends; return texts, how many of them are part of it, and the end."""
        texts: list[str] = []
        least = self._request.sampling.min_tokens
        for index, token in enumerate(tokens):
            if token in self._request.stop_ids and self._num_tokens >= least:
                return [*texts, self._rest()], index, "stop"
            self._num_tokens += 1
            if self._stream is not None:
                texts.append(self._stream.push(token, may_stop=self._num_tokens >= least))
                if self._stream.stopped:
                    return texts, index + 1, "stop"
            if self._num_tokens == self._request.max_tokens:
                return [*texts, self._rest()], index + 1, "length"
        return texts, len(tokens), None

    def _rest(self) -> str:
        return "" if self._stream is None else self._stream.close()
