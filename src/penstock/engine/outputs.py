"""Outputs of requests: sampled tokens to text deltas, stop conditions, whole completions; no torch."""

from dataclasses import dataclass

from penstock.engine.detokenizer import TextStream
from penstock.engine.request import ContinuationScore, Finish, OutputDelta, Request, TokenLogprob
from penstock.engine.scheduling.sequence import Sequence


@dataclass(slots=True, kw_only=True)  # not frozen: one per token, and freezing doubles its cost
class SampledTokens:
    """Tokens sampled for one share, or why there are none."""

    tokens: tuple[int, ...] = ()
    """One token plus the accepted drafts; empty while the prompt is incomplete, or for embeddings."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if requested."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Set with the first token of an answer, if requested."""
    embedding: tuple[float, ...] | None = None
    """The vector of an "embed" task, once the prompt is complete."""
    scores: tuple[ContinuationScore, ...] | None = None
    """The scores of a "score" task, once the prompt is complete."""
    error: str | None = None
    """Error message if no token can be sampled."""
    is_refused: bool = False
    """True if the request caused the error (HTTP 400), not the model (HTTP 500)."""


class SequenceOutput:
    """Output of one sequence: decodes its tokens and finds where the answer ends.

    Args:
        stream: detokenizer with the stop texts; None: an engine without a tokenizer.
    """

    def __init__(self, sequence: Sequence, stream: TextStream | None) -> None:
        self.sequence = sequence
        self._request = sequence.request
        self._stream = stream
        self._num_tokens = 0

    def take(self, sampled: SampledTokens) -> OutputDelta | None:
        """Return the delta of a step, with `finish` set if the answer ends; None: nothing to output yet."""
        if sampled.error is not None:
            return self.end("refused" if sampled.is_refused else "error", error=sampled.error)
        if sampled.embedding is not None:
            return self.end("stop", embedding=sampled.embedding)
        if sampled.scores is not None:
            return self.end("stop", scores=sampled.scores)
        if not sampled.tokens:
            return None
        texts, num_kept, finish = self._written(sampled.tokens)
        return OutputDelta(
            request_id=self.sequence.request_id,
            answer=self.sequence.answer,
            text=texts[0] if len(texts) == 1 else "".join(texts),
            token_ids=sampled.tokens[:num_kept],
            logprobs=sampled.logprobs[:num_kept],
            prompt_logprobs=sampled.prompt_logprobs,
            finish=finish,
            stop_reason=self._stop_reason(sampled.tokens, num_kept) if finish == "stop" else None,
            num_cached=self.sequence.num_cached if finish else 0,
        )

    def end(
        self,
        finish: Finish,
        *,
        error: str | None = None,
        embedding: tuple[float, ...] | None = None,
        scores: tuple[ContinuationScore, ...] | None = None,
    ) -> OutputDelta:
        """Return the last delta of an answer that something other than its tokens ended."""
        return OutputDelta(
            request_id=self.sequence.request_id,
            answer=self.sequence.answer,
            text=self._rest(),
            embedding=embedding,
            scores=scores,
            finish=finish,
            error=error,
            num_cached=self.sequence.num_cached,
        )

    def _written(self, tokens: tuple[int, ...]) -> tuple[list[str], int, Finish | None]:
        """Decode tokens until the answer ends; return texts, number of tokens used, and the finish reason."""
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

    def _stop_reason(self, tokens: tuple[int, ...], num_kept: int) -> int | str | None:
        """Return the stop text, or the stop token, which is the one after those that are kept."""
        text = None if self._stream is None else self._stream.stop_text
        return tokens[num_kept] if text is None else text

    def _rest(self) -> str:
        return "" if self._stream is None else self._stream.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completed answer."""

    text: str
    """Text without the stop token or stop text that ended it."""
    token_ids: tuple[int, ...]
    """Token ids without the stop token; those of a stop text are included."""
    finish: Finish
    """Finish reason."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if requested."""
    embedding: tuple[float, ...] | None = None
    """The vector of an "embed" task."""
    scores: tuple[ContinuationScore, ...] = ()
    """One per continuation of a "score" task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All answers to one prompt."""

    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    answers: tuple[CompletionOutput, ...]
    """`num_answers` completions."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per prompt token, None for the first; only if requested."""
    num_cached: int = 0
    """Prompt tokens that the first answer took from the prefix cache."""

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first answer."""
        return self.answers[0].token_ids


class Collected:
    """Collects the deltas of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._deltas: list[list[OutputDelta]] = [[] for _ in range(request.num_answers)]

    def take(self, delta: OutputDelta) -> None:
        """Add a delta."""
        self._deltas[delta.answer].append(delta)

    def answers(self) -> RequestOutput:
        """Return the complete output, once every answer has its last delta."""
        told = [delta.prompt_logprobs for deltas in self._deltas for delta in deltas]
        return RequestOutput(
            prompt=self._request.prompt,
            answers=tuple(_joined(deltas) for deltas in self._deltas),
            prompt_logprobs=next((found for found in told if found is not None), None),
            num_cached=self._deltas[0][-1].num_cached,
        )


def _joined(deltas: list[OutputDelta]) -> CompletionOutput:
    finish = deltas[-1].finish
    assert finish is not None, deltas
    return CompletionOutput(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish=finish,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        embedding=deltas[-1].embedding,
        scores=deltas[-1].scores or (),
    )
