"""A model for Python programs: prompts in, answers out, many at once.

    with penstock.LLM("runs/first") as llm:
        for answers in llm.generate(["A penstock is", "Water flows"]):
            print(answers.text)

Everything that is asked, from any thread or task, is computed together by one engine, so a list of prompts
is faster than one prompt after the other, and an answer does not depend on what else is asked.
"""

import asyncio
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from penstock.core import clock
from penstock.core.errors import AnswerFailed, ModelError, UsageError
from penstock.engine.assemble import build_engine
from penstock.engine.background import EngineThread
from penstock.engine.collected import Answers, Collected
from penstock.engine.config import EngineConfig
from penstock.engine.params import Params, params_for
from penstock.engine.prompts import Prompt, check_prompt, prompts_of, room_after, token_ids
from penstock.engine.request import Piece, Request
from penstock.engine.words import Words
from penstock.text.chat import Message

_DEFAULT = Params()


class LLM:
    """A model ready to answer; safe to share between threads.

    Args:
        path: a Hugging Face folder, a run or a checkpoint. It is opened here and a thread is started, so
            use `with`, or `close`.
        config: how; the defaults suit one model on one machine.

    Raises:
        UsageError: there is no such folder, or config is none.
        ConfigError: the memory has no room for one context.
        ModelError: the folder holds no model that can be opened, or no tokenizer.
    """

    def __init__(self, path: Path | str, config: EngineConfig | None = None) -> None:
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise UsageError(
                "config is no EngineConfig", got=config, fix='Write EngineConfig(weights="int8").'
            )
        engine = build_engine(Path(path), config)
        if engine.words is None:
            engine.close()
            raise ModelError(f"{path} has no tokenizer.json", fix="Copy it from where the model came from.")
        self.words: Words = engine.words
        self.capacity = engine.capacity
        self.thread = EngineThread(engine).start()
        """For whoever needs more than is here, such as a server."""
        self._finalizer = weakref.finalize(self, self.thread.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is being answered and free the model; once more does nothing."""
        self._finalizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = _DEFAULT,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Answers]:
        """Return the answers to each prompt, in the order of the prompts.

        Args:
            prompts: a text or several, or tokens: [tokens] of one prompt, [n][tokens] of several.
            params: for all prompts, or [n] one for each.
            on_progress: called with (answers done, answers in all) whenever one ends.

        Raises:
            UsageError: a prompt cannot be answered, and nothing was computed; or an answer's grammar could
                not be followed to its end.
            AnswerFailed: the engine failed; the other answers are cancelled.
        """
        asked = prompts_of(prompts)
        each = zip(asked, params_for(params, len(asked)), strict=True)
        return self.collect([self.request(prompt, params) for prompt, params in each], on_progress)

    def chat(self, messages: Sequence[Message], params: Params = _DEFAULT) -> Answers:
        """Return the answers to a conversation; errors as in `generate`."""
        return self.collect([self.chat_request(messages, params)])[0]

    def stream(self, prompt: Prompt | Request, params: Params = _DEFAULT) -> Iterator[Piece]:
        """Yield what is added to the answers, as it is drawn; leaving the iterator cancels the rest.

        Args:
            prompt: also a request that `request` or `chat_request` made.

        Raises:
            UsageError: at once, as in `generate`; the iterator raises what `generate` does.
        """
        request = prompt if isinstance(prompt, Request) else self.request(prompt, params)
        self.thread.engine.check(request)
        return self._pieces(request)

    async def stream_async(self, prompt: Prompt | Request, params: Params = _DEFAULT) -> AsyncIterator[Piece]:
        """Yield as `stream` does, without holding up the event loop."""
        request = prompt if isinstance(prompt, Request) else self.request(prompt, params)
        await asyncio.to_thread(self.thread.engine.check, request)  # a grammar may take long to compile
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()

        def on_piece(piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        request_id = self.thread.submit(request, on_piece)
        try:
            num_open = request.num_answers
            while num_open:
                piece = _checked(await pieces.get())
                num_open -= piece.finish is not None
                yield piece
        finally:
            self.thread.cancel(request_id)

    def embed(self, texts: Prompt | Sequence[Prompt], *, adapter: str | None = None) -> np.ndarray:
        """Return a vector of length 1 per text, [n, hidden] float32; a text may be its tokens.

        It is the normalised residual stream at the last token, which alone has seen the whole text. A model
        that was not trained for it gives vectors of little use.
        """
        found = self.collect([self._embed_request(text, adapter) for text in prompts_of(texts)])
        return np.array([answers.answers[0].embedding for answers in found], dtype=np.float32)

    def add_adapter(self, name: str, folder: Path | str) -> None:
        """Open a LoRA adapter that PEFT saved, for calls that name it from now on.

        Raises:
            UsageError: there is one of that name.
            ModelError: it is no LoRA adapter of this model.
        """
        self.thread.call(lambda engine: engine.add_adapter(name, Path(folder)))

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            UsageError: there is none of that name, or answers that use it are in the making.
        """
        self.thread.call(lambda engine: engine.remove_adapter(name))

    def request(self, prompt: Prompt, params: Params = _DEFAULT) -> Request:
        """Return what the engine is asked for a prompt.

        Raises:
            UsageError: prompt and answer do not fit the model.
        """
        tokens = self._tokens(prompt)
        room = room_after(
            tokens,
            context=self.capacity.context,
            vocab_size=self.capacity.vocab_size,
            max_tokens=params.max_tokens,
        )
        return Request(
            prompt=tuple(tokens),
            max_tokens=room,
            sampling=params.sampling,
            stop_ids=self.words.stop_ids if params.stop_ids is None else frozenset(params.stop_ids),
            stop_texts=params.stop_texts,
            num_answers=params.num_answers,
            priority=params.priority,
            adapter=params.adapter,
            grammar=params.grammar,
            deadline_s=None if params.timeout_s is None else clock.monotonic() + params.timeout_s,
            num_prompt_logprobs=params.num_prompt_logprobs,
        )

    def chat_request(self, messages: Sequence[Message], params: Params = _DEFAULT) -> Request:
        """Return what the engine is asked for a conversation.

        Raises:
            UsageError: it does not fit the model, or the template refuses it.
        """
        stops = (*params.stop_texts, *self.words.template.stop_texts)
        return self.request(self.words.encode_chat(messages), replace(params, stop_texts=stops))

    def _embed_request(self, text: Prompt, adapter: str | None) -> Request:
        tokens = self._tokens(text)
        check_prompt(tokens, context=self.capacity.context, vocab_size=self.capacity.vocab_size)
        return Request(prompt=tuple(tokens), max_tokens=0, adapter=adapter, task="embed")

    def _tokens(self, prompt: Prompt) -> list[int]:
        return self.words.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        pieces = queue.SimpleQueue[Piece]()
        request_id = self.thread.submit(request, pieces.put)
        try:
            num_open = request.num_answers
            while num_open:
                piece = _checked(pieces.get())
                num_open -= piece.finish is not None
                yield piece
        finally:
            self.thread.cancel(request_id)

    def collect(
        self, requests: Sequence[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Answers]:
        """Return the answers to requests, which may differ in all they ask; errors as in `generate`."""
        for request in requests:
            self.thread.engine.check(request)
        pieces = queue.SimpleQueue[Piece]()
        found = {self.thread.submit(request, pieces.put): Collected(request) for request in requests}
        done, total = 0, sum(request.num_answers for request in requests)
        try:
            while done < total:
                piece = _checked(pieces.get())
                found[piece.request_id].take(piece)
                if piece.finish is not None:
                    done += 1
                    if on_progress is not None:
                        on_progress(done, total)
        finally:
            if done < total:
                for request_id in found:
                    self.thread.cancel(request_id)
        return [collected.answers() for collected in found.values()]


def _checked(piece: Piece) -> Piece:
    if piece.finish == "refused":
        raise UsageError(piece.error or "The request cannot be followed")
    if piece.finish == "error":
        raise AnswerFailed(piece.error or "The engine failed")
    return piece
