"""The model of an evaluation: lm-eval's interface over our engine in this process.

Texts become tokens, and are cut, as by lm-eval's own `hf` model, so that figures agree: its start tokens, its
begin-of-text token where there is no context, its windows of long texts, its cut on the left. Of requests
with one context only the continuations are computed anew (`answer_requests.py`), and requests that differ in
their last token only are one.

Import this module only when it is used: lm-eval takes seconds to load.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from penstock.core.errors import ConfigError, InputError, ModelError, UsageError
from penstock.core.rng import key_of
from penstock.engine.request import Request
from penstock.engine.sampling_params import GREEDY, Params, Sampling
from penstock.evaluation.answer_requests import answers_of
from penstock.text.template_process import TemplateProcess

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

Progress = Callable[[str, int, int], None]
"""Called with (what is computed, done, all)."""
Pair = tuple[object, list[int], list[int]]
"""Key of a request in lm-eval, the tokens of its context, and those of its continuation."""

_DRAWN = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings of sampling, with what they are where a task leaves them out."""
_NEUTRAL = {"do_sample": (True, False, None), "num_beams": (1, None), "use_cache": (True, False, None)}
"""Further settings of generation and the values that change nothing here."""


class EngineModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A language model for lm-eval; close it to end the process of its chat template.

    Args:
        llm: the engine; the caller closes it.
        adapter: name of a LoRA adapter of the engine.
        max_gen_toks: tokens of an answer whose task does not say how many.
        seed: of answers whose task draws them at random.
    """

    def __init__(
        self,
        llm: "LLM",
        *,
        adapter: str | None = None,
        max_gen_toks: int = 256,
        seed: int = 1234,
        on_progress: Progress = lambda _what, _done, _all: None,
    ) -> None:
        super().__init__()
        self.llm = llm
        self.num_cut = 0
        """Requests that were longer than the model's context, and lost their first tokens."""
        self.num_without_system = 0
        """Conversations whose system message the chat template refused; they were written without it."""
        self._adapter = adapter
        self._max_gen_toks = max_gen_toks
        self._seed = seed
        self._on_progress = on_progress
        self._text = llm.text_processor.of(adapter)
        self._templates = TemplateProcess(self._text.template)
        self._encoded: dict[str, list[int]] = {}
        names = self._text.template.variables
        vocabulary = self._text.tokenizer.vocabulary()
        self._begin = vocabulary.get(names.get("bos_token", ""))
        self._end = vocabulary.get(names.get("eos_token", ""), self._text.tokenizer.eos_id)

    def close(self) -> None:
        """End the process of the chat template. Idempotent."""
        self._templates.close()

    @property
    def max_length(self) -> int:
        """Tokens of the model's context."""
        return self.llm.capacity.context

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        if self._end is None:
            raise ModelError(
                "The tokenizer names no end token", fix="Add eos_token to tokenizer_config.json."
            )
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """Token in front of a text without context: the begin of a text, or the end of another."""
        if self._begin is not None:
            return self._begin
        return self._text.start_ids[0] if self._end is None and self._text.start_ids else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Identity of the tokenizer."""
        return self._text.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template if it is applied."""
        return self._text.template.source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text: ready for an answer, or for the rest of the last message."""
        messages = chat_history
        try:
            text = self._templates.render(messages, add_generation_prompt=add_generation_prompt)
        except UsageError:
            messages = [message for message in messages if message["role"] != "system"]
            if len(messages) == len(chat_history):
                raise
            self.num_without_system += 1  # as transformers' templates without a system turn want it
            text = self._templates.render(messages, add_generation_prompt=add_generation_prompt)
        return text if add_generation_prompt else _open_ended(text, messages[-1]["content"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Return the tokens of a text, behind the model's start tokens unless it has them already."""
        ids = self._encoded.get(string)
        if ids is None:
            ids = self._text.tokenizer.encode(string, special=True)
        if add_special_tokens is False or (add_special_tokens is None and self._has_begin(string)):
            return ids
        return [*self._text.start_ids, *ids]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would write it."""
        pairs = [request.args for request in requests]
        self._encode({context.rstrip() for context, _ in pairs} | {a + b for a, b in pairs})
        try:
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
            return found
        finally:
            self._encoded.clear()

    def loglikelihood_rolling(self, requests: list[Instance], **_: object) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the model's context."""
        self._encode({request.args[0] for request in requests})
        try:
            windows = [
                [(None, *make_disjoint_window(window)) for window in self._windows(request.args[0])]
                for request in requests
            ]
        finally:
            self._encoded.clear()
        found = iter(self._loglikelihood_tokens([window for each in windows for window in each]))
        return [sum(next(found)[0] for _ in each) for each in windows]

    def generate_until(self, requests: list[Instance], **_: object) -> list[str]:
        """Return the answers to prompts, each up to its first stop text."""
        self._encode({request.args[0] for request in requests})
        try:
            asked = [self._answer_request(index, *request.args) for index, request in enumerate(requests)]
        finally:
            self._encoded.clear()
        outputs = answers_of(self.llm, [one for one, _ in asked], on_progress=self._shown("answers"))
        decode = self._text.tokenizer.decode
        return [
            postprocess_generated_text(decode(output.answers[0].token_ids), stop=until, think_end_token=None)
            for output, (_, until) in zip(outputs, asked, strict=True)
        ]

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: object) -> list[tuple[float, bool]]:
        places: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
        for index, (name, context, continuation) in enumerate(requests):
            prompt = self._prompt(name, context, continuation)
            places.setdefault(prompt, {}).setdefault(tuple(continuation), []).append(index)
        asked = [
            Request(
                prompt=prompt, max_tokens=0, task="score", continuations=tuple(each), adapter=self._adapter
            )
            for prompt, each in places.items()
        ]
        outputs = answers_of(self.llm, asked, on_progress=self._shown("log-likelihoods"))
        found: dict[int, tuple[float, bool]] = {}
        for output, each in zip(outputs, places.values(), strict=True):
            for score, indices in zip(output.answers[0].scores, each.values(), strict=True):
                found |= dict.fromkeys(indices, (score.logprob, score.is_greedy))
        return [found[index] for index in range(len(requests))]

    def _prompt(self, name: object, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        """Return what predicts a continuation: all before its last token, cut on the left to the context."""
        if not continuation:
            raise InputError("A continuation has no tokens", got=name, fix="Correct the task's choices.")
        if len(continuation) > self.max_length:
            raise InputError(
                f"A continuation of {len(continuation):,} tokens is longer than the model's context of "
                f"{self.max_length:,}",
                fix="Leave the task out, or take a model with a longer context.",
            )
        whole = (*context, *continuation)
        self.num_cut += len(whole) > self.max_length + 1
        return whole[-(self.max_length + 1) : -1]

    def _answer_request(
        self, index: int, context: str, settings: Mapping[str, Any]
    ) -> tuple[Request, list[str]]:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), self._max_gen_toks))
        end = self._text.tokenizer.decode([self.eot_token_id], special=True)
        until = [text for text in handle_stop_sequences(kwargs.pop("until", None), eos=end) if text]
        max_tokens = kwargs.pop("max_gen_toks")
        room = self.max_length - max_tokens
        if room < 1:
            raise ConfigError(
                f"A task asks for answers of {max_tokens:,} tokens, and the model's context has "
                f"{self.max_length:,}",
                fix="Lower max_gen_toks in its generation_kwargs.",
            )
        tokens = self.tok_encode(context)
        self.num_cut += len(tokens) > room
        params = Params(
            sampling=self._sampling(kwargs, index),
            max_tokens=max_tokens,
            stop_texts=tuple(until),
            adapter=self._adapter,
        )
        return self.llm.request(tokens[-room:] or [self.prefix_token_id], params), until

    def _sampling(self, kwargs: Mapping[str, Any], index: int) -> Sampling:
        unknown = {
            name: value
            for name, value in kwargs.items()
            if name not in _DRAWN and value not in _NEUTRAL.get(name, ())
        }
        if unknown:
            raise ConfigError(
                "A task generates with settings that the engine does not have",
                got=unknown,
                fix=f"Known: {', '.join([*_DRAWN, 'do_sample', 'until', 'max_gen_toks'])}.",
            )
        if not kwargs.get("do_sample") or not kwargs.get("temperature", 1.0):
            return GREEDY
        drawn = {name: kwargs.get(name, default) for name, default in _DRAWN.items()}
        drawn["top_k"] = drawn["top_k"] or None  # 0 means all
        return Sampling(seed=key_of(self._seed, "answer", index) >> 1, **drawn)

    def _windows(self, text: str) -> Iterable[tuple[list[int], list[int]]]:
        found: Iterable[tuple[list[int], list[int]]] = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return found

    def _encode(self, texts: set[str]) -> None:
        """Encode texts on all cores, for `tok_encode`."""
        each = sorted(texts)
        self._encoded = dict(zip(each, self._text.tokenizer.encode_special_batch(each), strict=True))

    def _has_begin(self, text: str) -> bool:
        names = self._text.template.variables
        begin = names.get("bos_token") or names.get("eos_token")
        return begin is not None and text.startswith(begin)

    def _shown(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self._on_progress(what, done, total)


def _open_ended(text: str, last: str) -> str:
    """Return a conversation's text up to the end of its last message, for the model to continue.

    >>> _open_ended("<user>Hi<end><assistant>The answer is<end>", "The answer is")
    '<user>Hi<end><assistant>The answer is'
    """
    begin = text.rfind(last.strip())
    if begin < 0:
        raise ModelError(
            "The chat template does not write the last message as it is, so no answer can continue it",
            got=last[:100],
            fix="Correct the template, or score the task without --chat-template.",
        )
    kept = last.lstrip() if text[begin:].startswith(last.lstrip()) else last.strip()
    return text[: begin + len(kept)]
