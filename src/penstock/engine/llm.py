"""Python API for inference: prompts in, completions out, many at once.

    with penstock.LLM("runs/first") as llm:
        for answers in llm.generate(["A penstock is", "Water flows"]):
            print(answers.text)

One engine computes the requests of all threads and tasks together: a list of prompts is faster than one
prompt after the other, and an answer does not depend on what else runs.
"""

import asyncio
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from penstock.core import clock
from penstock.core.errors import AnswerFailed, ModelError, UsageError
from penstock.engine.assemble import build_engine
from penstock.engine.background import EngineThread
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.outputs import Collected, RequestOutput
from penstock.engine.prompts import Prompt, check_prompt, prompts_of, room_after, token_ids
from penstock.engine.request import OutputDelta, Request
from penstock.engine.sampling_params import Params, Sampling, params_for
from penstock.engine.text_processor import TextProcessor
from penstock.text.chat_template import Message

_DEFAULT = Params()


class LLM:
    """Language model for inference; safe to share between threads.

    Args:
        path: a Hugging Face folder, a run or a checkpoint. The model is loaded and a thread is started,
            so use `with`, or call `close`.
        config: engine options; the defaults suit one model on one machine.

    Raises:
        UsageError: the folder does not exist, or config is not an EngineConfig.
        ConfigError: the memory has no room for one context.
        ModelError: the folder has no model that can be opened, or no tokenizer.
    """

    def __init__(self, path: Path | str, config: EngineConfig | None = None) -> None:
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise UsageError(
                "config is not an EngineConfig", got=config, fix='Write EngineConfig(weights="int8").'
            )
        self._start(build_engine(Path(path), config), name=str(path))

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Return an LLM that takes over an existing engine: nothing else may use it. Close it likewise.

        Raises:
            ModelError: the engine has no tokenizer.
        """
        made = cls.__new__(cls)
        made._start(engine, name="The model")
        return made

    def _start(self, engine: Engine, *, name: str) -> None:
        if engine.text_processor is None:
            engine.close()
            raise ModelError(f"{name} has no tokenizer.json", fix="Copy it from the original model's folder.")
        self.text_processor: TextProcessor = engine.text_processor
        self.capacity = engine.capacity
        self.kernels: Mapping[str, str] = engine.kernels.chosen
        """Operation -> name of the kernel that computes it, where several could."""
        self.thread = EngineThread(engine).start()
        """The engine's thread, for callers such as a server that submit requests themselves."""
        self._finalizer = weakref.finalize(self, self.thread.close)

    @property
    def words(self) -> TextProcessor:
        """Older name of `text_processor`."""
        return self.text_processor

    @property
    def default_sampling(self) -> Sampling:
        """Sampling of requests that name none: the model's `generation_config.json`, else temperature 1.

        Raises:
            UsageError: the file has values out of range.
        """
        return self.text_processor.default_sampling

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests and free the model. Idempotent."""
        self._finalizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = _DEFAULT,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Return the completions of each prompt, in the order of the prompts.

        Args:
            prompts: one text, a list of texts, one list of token ids, or a list of such lists.
            params: one Params for all prompts, or a list of one per prompt.
            on_progress: called with (finished answers, all answers) whenever one finishes.

        Raises:
            UsageError: a prompt does not fit (nothing was computed), or no token could follow an answer's
                grammar.
            AnswerFailed: the engine failed; the other answers are cancelled.
        """
        asked = prompts_of(prompts)
        each = zip(asked, params_for(params, len(asked)), strict=True)
        return self.collect([self.request(prompt, params) for prompt, params in each], on_progress)

    def chat(self, messages: Sequence[Message], params: Params = _DEFAULT) -> RequestOutput:
        """Return the answers to a conversation; raises as `generate` does."""
        return self.collect([self.chat_request(messages, params)])[0]

    def stream(self, prompt: Prompt | Request, params: Params = _DEFAULT) -> Iterator[OutputDelta]:
        """Yield deltas of the answers as they are sampled; closing the iterator cancels the request.

        Args:
            prompt: text, token ids, or a request from `request` or `chat_request`.

        Raises:
            UsageError: at once, as in `generate`; the iterator raises as `generate` does.
        """
        request = prompt if isinstance(prompt, Request) else self.request(prompt, params)
        self.thread.engine.check(request)
        return self._deltas(request)

    async def stream_async(
        self, prompt: Prompt | Request, params: Params = _DEFAULT
    ) -> AsyncGenerator[OutputDelta, None]:
        """Yield as `stream` does, without blocking the event loop."""
        request = prompt if isinstance(prompt, Request) else self.request(prompt, params)
        await asyncio.to_thread(self.thread.engine.check, request)  # compiling a grammar may take seconds
        loop, deltas = asyncio.get_running_loop(), asyncio.Queue[OutputDelta]()

        def on_delta(delta: OutputDelta) -> None:
            with suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        request_id = self.thread.submit(request, on_delta)
        try:
            num_open = request.num_answers
            while num_open:
                delta = _checked(await deltas.get())
                num_open -= delta.finish is not None
                yield delta
        finally:
            self.thread.cancel(request_id)

    def embed(self, texts: Prompt | Sequence[Prompt], *, adapter: str | None = None) -> np.ndarray:
        """Return one embedding of length 1 per text, [n, hidden] float32; a text may also be token ids.

        A text has the tokens that the tokenizer's post-processor adds, and the prompt of the folder's
        `default_prompt_name`, as in sentence-transformers; token ids are taken as they are. The embedding is
        the normalised hidden state at the last token, the only one that attends to the whole text. Models
        that were not trained for embeddings give poor ones.

        Raises:
            UsageError: a text does not fit into the context or is longer than the folder's max_seq_length, or
                the folder asks for another pooling or a setting that is not applied.
        """
        found = self.collect([self._embed_request(text, adapter) for text in prompts_of(texts)])
        return np.array([answers.answers[0].embedding for answers in found], dtype=np.float32)

    def add_adapter(self, name: str, folder: Path | str) -> None:
        """Load a LoRA adapter saved by PEFT; later requests may name it.

        They are written with the tokenizer and chat template of its folder, where it has them, and end where
        its answers do.

        Raises:
            InputError, UsageError: the name is taken, or a file of the folder is not valid JSON or no
                tokenizer.
            ModelError: the folder is not a LoRA adapter of this model.
        """
        own = self.text_processor.read_adapter(Path(folder))  # here: answers of others need not wait for it
        self.thread.call(lambda engine: engine.add_adapter(name, Path(folder), text_processor=own))

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            UsageError: the name is unknown, or unfinished requests use the adapter.
        """
        self.thread.call(lambda engine: engine.remove_adapter(name))

    def request(self, prompt: Prompt, params: Params = _DEFAULT) -> Request:
        """Return the engine's request for a prompt.

        Raises:
            UsageError: prompt and answer do not fit into the model's context.
        """
        text_processor = self.text_processor.of(params.adapter)
        tokens = _tokens(prompt, text_processor)
        room = room_after(
            tokens,
            context=self.capacity.context,
            vocab_size=self.thread.engine.vocab_size_of(params.adapter),
            max_tokens=params.max_tokens,
        )
        return Request(
            prompt=tuple(tokens),
            max_tokens=room,
            sampling=self.default_sampling if params.sampling is None else params.sampling,
            stop_ids=text_processor.stop_ids if params.stop_ids is None else frozenset(params.stop_ids),
            stop_texts=params.stop_texts,
            num_answers=params.num_answers,
            priority=params.priority,
            adapter=params.adapter,
            grammar=params.grammar,
            deadline_s=None if params.timeout_s is None else clock.monotonic() + params.timeout_s,
            num_prompt_logprobs=params.num_prompt_logprobs,
        )

    def chat_request(self, messages: Sequence[Message], params: Params = _DEFAULT) -> Request:
        """Return the engine's request for a conversation.

        Raises:
            UsageError: it does not fit into the context, or the chat template refuses it.
        """
        text_processor = self.text_processor.of(params.adapter)
        stops = (*params.stop_texts, *text_processor.template.stop_texts)
        return self.request(text_processor.encode_chat(messages), replace(params, stop_texts=stops))

    def _embed_request(self, text: Prompt, adapter: str | None) -> Request:
        text_processor = self.text_processor.of(adapter)
        text_processor.embedding.check()
        tokens = text_processor.encode_embedded(text) if isinstance(text, str) else token_ids(text)
        vocab_size = self.thread.engine.vocab_size_of(adapter)
        check_prompt(tokens, context=self.capacity.context, vocab_size=vocab_size)
        text_processor.embedding.check_length(len(tokens))
        return Request(prompt=tuple(tokens), max_tokens=0, adapter=adapter, task="embed")

    def _deltas(self, request: Request) -> Iterator[OutputDelta]:
        deltas = queue.SimpleQueue[OutputDelta]()
        request_id = self.thread.submit(request, deltas.put)
        try:
            num_open = request.num_answers
            while num_open:
                delta = _checked(deltas.get())
                num_open -= delta.finish is not None
                yield delta
        finally:
            self.thread.cancel(request_id)

    def collect(
        self, requests: Sequence[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[RequestOutput]:
        """Return the outputs of requests, each with its own settings; raises as `generate` does."""
        for request in requests:
            self.thread.engine.check(request)
        deltas = queue.SimpleQueue[OutputDelta]()
        found = {self.thread.submit(request, deltas.put): Collected(request) for request in requests}
        done, total = 0, sum(request.num_answers for request in requests)
        try:
            while done < total:
                delta = _checked(deltas.get())
                found[delta.request_id].take(delta)
                if delta.finish is not None:
                    done += 1
                    if on_progress is not None:
                        on_progress(done, total)
        finally:
            if done < total:
                for request_id in found:
                    self.thread.cancel(request_id)
        return [collected.answers() for collected in found.values()]


def _tokens(prompt: Prompt, text_processor: TextProcessor) -> list[int]:
    return text_processor.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)


def _checked(delta: OutputDelta) -> OutputDelta:
    if delta.finish == "refused":
        raise UsageError(delta.error or "The request cannot be continued")
    if delta.finish == "error":
        raise AnswerFailed(delta.error or "The engine failed")
    return delta
