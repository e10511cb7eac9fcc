"""Samples while training: a few prompts, answered now and then by the engine on the run's live weights.

Greedy, so what changes between two steps is what the model learned between them. A failure (no memory for a
copy, say) warns and training goes on: samples are for reading.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.checkpoint.resume import agreed
from penstock.core import clock
from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.log import EventLog
from penstock.data.types import IGNORED_LABEL
from penstock.engine.llm import LLM
from penstock.engine.sampling_params import Params, Sampling
from penstock.engine.text_processor import TextProcessor
from penstock.obs.sinks import Record
from penstock.parallel.mesh import World
from penstock.train.data_setup import train_loader
from penstock.train.live_engine import LiveEngineFailed, live_engine, signs_of_life, tokenizer_of
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.samples_config import SampleChat, SamplesConfig
from penstock.train.state import TrainState

log = EventLog(__name__)

_MAX_PROMPT_TOKENS = 32  # of a text; a conversation goes up to its first answer
_MIN_TOKENS = 4
_MAX_ROWS = 1_000  # that are searched for documents to ask about
_SHOWN = 160  # characters in a log line


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePrompt:
    """Prompt, and what really follows if that is known."""

    text: str
    """As a person reads it."""
    ids: tuple[int, ...]
    """As the model reads it."""
    stop_texts: tuple[str, ...] = ()
    reference: str | None = None
    """The held-out document's own continuation; None: nobody knows."""


class PromptSamples:
    """The prompts of a run.

    Args:
        config: of the recipe.
        prompts: on rank 0; others need none.
    """

    def __init__(self, config: SamplesConfig, prompts: Sequence[SamplePrompt]) -> None:
        self._config, self._prompts = config, prompts
        self._answered = 0

    def is_due(self, step: int, *, last: bool) -> bool:
        """True if the prompts are to be answered after a step; not twice after the same one."""
        return step != self._answered and (last or step % self._config.every == 0)

    def answer(self, state: TrainState, config: TrainConfig, world: World) -> Record | None:
        """Return the record of all answers, on rank 0; None on others. Every rank must call it.

        A failure is logged, and there is no record.
        """
        began, self._answered = clock.monotonic(), state.step
        context = max((len(prompt.ids) for prompt in self._prompts), default=0) + self._config.max_tokens
        try:
            with (
                live_engine(
                    state,
                    config,
                    world,
                    max_sequences=max(len(self._prompts), 1),
                    max_context=min(context, config.model.context),
                ) as llm,
                signs_of_life(state, world, "samples") as progress,
            ):
                answers = [] if llm is None else self._ask(llm, progress)
        except LiveEngineFailed as error:
            if world.is_first:
                log.warning(
                    "samples_failed", "No samples at step {step:,}: {error}", step=state.step, error=error
                )
            return None
        if not world.is_first:
            return None
        for each in answers:
            _say(state.step, each)
        return {
            "event": "samples",
            "step": state.step,
            "answers": answers,
            "samples_s": clock.monotonic() - began,
        }

    def _ask(self, llm: LLM, progress: Callable[..., None]) -> list[dict[str, str]]:
        requests = [
            llm.request(
                list(prompt.ids),
                Params(
                    sampling=Sampling(temperature=0.0),
                    max_tokens=self._config.max_tokens,
                    stop_texts=prompt.stop_texts,
                ),
            )
            for prompt in self._prompts
        ]
        found = llm.collect(requests, progress)
        return [
            {
                "prompt": prompt.text,
                "answer": out.text,
                "finish": str(out.answers[0].finish),
                **({} if prompt.reference is None else {"reference": prompt.reference}),
            }
            for prompt, out in zip(self._prompts, found, strict=True)
        ]


def open_samples(config: TrainConfig, world: World) -> PromptSamples:
    """Return the samples of a recipe; every rank must call it.

    The run's folder has its tokenizer by now.

    Raises:
        PenstockError: a prompt is too long, the template refuses it, or there is no tokenizer.
    """
    asked = config.samples
    prompts: list[SamplePrompt] = []

    def prepare() -> None:
        if world.is_first:
            processor = TextProcessor.load(tokenizer_of(config))
            prompts.extend(given_prompts(asked, processor))
            prompts.extend(_heldout(config, processor))
            _check_lengths(prompts, context=config.model.context)

    if (failure := agreed(prepare)) is not None:
        raise failure
    return PromptSamples(asked, prompts)


def given_prompts(asked: SamplesConfig, processor: TextProcessor) -> Iterator[SamplePrompt]:
    """Yield the prompts that a recipe writes out.

    Raises:
        ConfigError: the chat template refuses one.
    """
    for index, prompt in enumerate(asked.prompts):
        if isinstance(prompt, str):
            yield SamplePrompt(text=prompt, ids=tuple(processor.encode(prompt)))
            continue
        chat = prompt if isinstance(prompt, SampleChat) else SampleChat(messages=prompt)
        try:
            ids = processor.encode_chat(list(chat.messages), tools=list(chat.tools))  # type: ignore[arg-type]  # the template says what it takes
        except PenstockError as error:
            raise ConfigError(f"samples.prompts[{index}]: {error}") from None
        stops = processor.template.stop_texts
        yield SamplePrompt(text=_transcript(chat.messages), ids=tuple(ids), stop_texts=stops)


def _transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    if len(messages) == 1:
        return str(messages[0].get("content"))
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


def _heldout(config: TrainConfig, processor: TextProcessor) -> list[SamplePrompt]:
    """Return prompts from the first held-out rows, one a row."""
    asked = config.samples
    if not asked.heldout:
        return []
    once = dict.fromkeys(config.data.corpora, 1)
    size = {"split": "heldout", "global_batch_size": 1, "epochs": once, "seed": 0, "deliver": "numpy"}
    loader = train_loader(config, rank=0, world_size=1, **size)
    rows = min(_MAX_ROWS, sum(loader.first_rows.values()))
    found: list[SamplePrompt] = []
    for row in range(rows):
        if len(found) == asked.heldout:
            break
        batch = loader.gather(np.array([row]))
        found += [prompt for prompt in _of_row(batch, asked, processor) if prompt not in found][:1]
    if len(found) < asked.heldout:
        log.warning(
            "samples_heldout",
            "Only {found} held-out documents can serve as prompts, of {requested} requested",
            found=len(found),
            requested=asked.heldout,
        )
    return found


def _of_row(
    batch: Mapping[str, Any], asked: SamplesConfig, processor: TextProcessor
) -> Iterator[SamplePrompt]:
    ids, labels, ends = batch["input_ids"][0], batch["labels"][0], batch["cu_seqlens"]
    for start, end in pairwise(ends):
        cut = prompt_of(ids[start:end], labels[start:end], max_tokens=asked.max_tokens)
        if cut is not None:
            prompt, reference = cut
            yield SamplePrompt(
                text=processor.tokenizer.decode(prompt, special=True),
                ids=tuple(prompt),
                reference=processor.tokenizer.decode(reference),
            )


def prompt_of(ids: Int64, labels: Int64, *, max_tokens: int) -> tuple[list[int], list[int]] | None:
    """Cut a document into a prompt and what follows; None if it is too short or nothing in it is learned.

    A conversation is cut before the first tokens that are learned, which follow up to the next that are not;
    a text, of which all is learned, at 32 tokens or the half.

    Args:
        ids: [tokens].
        labels: [tokens] of the next position each; IGNORED_LABEL where it is not learned.

    >>> unlearned = IGNORED_LABEL
    >>> prompt_of(np.array([5, 6, 7, 8]), np.array([unlearned, 7, 8, unlearned]), max_tokens=9)
    ([5, 6], [7, 8])
    >>> prompt_of(np.array([5, 6, 7, 8]), np.array([6, 7, 8, unlearned]), max_tokens=1)
    ([5, 6], [7])
    """
    learned = labels != IGNORED_LABEL
    if len(ids) < _MIN_TOKENS or not learned.any():
        return None
    first = int(learned.argmax())
    if first == 0:
        cut = min(_MAX_PROMPT_TOKENS, len(ids) // 2)
        return ids[:cut].tolist(), ids[cut : cut + max_tokens].tolist()
    after = learned[first:]
    past = first + (len(after) if after.all() else int(after.argmin()))
    return ids[: first + 1].tolist(), labels[first : min(past, first + max_tokens)].tolist()


def _check_lengths(prompts: Sequence[SamplePrompt], *, context: int) -> None:
    for index, prompt in enumerate(prompts):
        if len(prompt.ids) >= context:
            raise ConfigError(
                f"Prompt {index + 1} of [samples] has {len(prompt.ids):,} tokens, and the model's context is "
                f"{context:,}, the answer included",
                got=prompt.text[:60],
                fix="Shorten it.",
            )


def _say(step: int, answer: Mapping[str, str]) -> None:
    prompt, text = (_shortened(answer[name]) for name in ("prompt", "answer"))
    log.info(
        "sample",
        "Sample of step {step:,}: {prompt!r} -> {answer!r}",
        step=step,
        prompt=prompt,
        answer=text,
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
