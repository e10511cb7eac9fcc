"""Hold answers to grammars: which tokens may come next, by llguidance.

A grammar is compiled when a request is made, on a thread of its own and outside the engine's steps, then
kept by its text; an answer starts from a copy. At each step a matcher marks the tokens that may follow,
which takes tens of microseconds for most grammars. Grammars come from whoever sends requests, so what
compiling and marking may cost is limited (docs/adr/0029).
"""

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import UsageError
from penstock.engine.request import Request
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 128
"""Grammars kept beside those of open requests; the least recently used goes, and would be compiled again."""

_STACK_BYTES = 512 * 2**20
"""Of the thread that compiles: llguidance calls itself for each rule that names another, and 8 MiB, used up
by a chain of some hundred rules, would end the process. Only what is touched takes memory."""

_COMPILE_S = 20.0
"""A compilation that takes longer is given up; its thread cannot be stopped, but its text is remembered."""

_COMPILE_FUEL = 100_000
_STEP_FUEL = 50_000
"""In llguidance's units: the worst grammars found took 0.2 s to compile, tens of ms a step (by hand)."""


class GrammarMatcher:
    """One answer's place in its grammar; used by one thread at a time."""

    def __init__(self, matcher: "LLMatcher", *, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._num_consumed = 0

    def allowed(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> np.ndarray | str:
        """Return [vocab_size] bool, which tokens may follow; or why the grammar cannot be followed on.

        Args:
            tokens: all of the answer so far, as the grammar allowed them; those of the last call begin it.
            drafts: guessed tokens after it; what follows one that is not allowed does not matter.
        """
        self._matcher.consume_tokens(list(tokens[self._num_consumed :]))
        self._num_consumed = len(tokens)
        ahead = self._matcher.try_consume_tokens(self._before_end(drafts)) if drafts else 0
        marks = self._matcher.compute_bitmask()
        if ahead:
            self._matcher.rollback(ahead)
        if self._matcher.is_error():
            return f"The grammar could not be followed: {_reason(self._matcher.get_error())}. Simplify it."
        bits = np.frombuffer(marks, dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _before_end(self, drafts: Sequence[int]) -> list[int]:
        ends = [i for i, token in enumerate(drafts) if token in self._end_ids]
        return list(drafts[: ends[0]] if ends else drafts)


class Grammars:
    """Compiles grammars for one tokenizer; safe to share between threads.

    Args:
        vocab_size: logits of the model; what its tokenizer has beyond them is never allowed.
        end_ids: tokens that end an answer, allowed where a grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Collection[int]) -> None:
        self._content = tokenizer.content
        self._num_entries = max(vocab_size, tokenizer.vocab_size)
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher | UsageError] = OrderedDict()
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def check(self, request: Request) -> None:
        """Refuse a grammar that cannot be followed; it is compiled now unless it is.

        Raises:
            UsageError: it is no grammar, nothing follows it, it is too large (the message has llguidance's
                reason), or the request's answers could not end where it does.
        """
        if request.sampling.min_tokens:
            raise UsageError(
                "min_tokens does not go with a grammar, which alone says where an answer ends",
                got=request.sampling.min_tokens,
                fix="Leave one of them out.",
            )
        if not self._end_ids.issubset(request.stop_ids):
            raise UsageError(
                "An answer that follows a grammar ends with the model's end token, which is not in stop_ids",
                got=sorted(request.stop_ids),
                fix=f"Add {sorted(self._end_ids)}, or ask without a grammar.",
            )
        assert request.grammar is not None
        self._prototype(request.grammar)

    def hold(self, request: Request) -> None:
        """Keep a request's grammar until it is released: none is compiled while a step waits."""
        if request.grammar is not None:
            with self._lock:
                self._held[request.grammar] += 1

    def release(self, request: Request) -> None:
        """Keep a grammar no longer on behalf of a request that has ended."""
        if request.grammar is not None:
            with self._lock:
                self._held[request.grammar] -= 1
                self._held += Counter()  # without those that nobody holds
                self._evict()

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Return a new matcher at the beginning of a grammar; errors as in `check`."""
        copy = self._prototype(grammar).deep_copy()
        return GrammarMatcher(copy, vocab_size=self._vocab_size, end_ids=self._end_ids)

    def _prototype(self, grammar: str) -> "LLMatcher":
        found = self._kept(grammar)
        if found is None:
            with self._compiling:  # one at a time: they are short, and the machine has other work
                found = self._kept(grammar) or _on_deep_stack(lambda: self._compile(grammar))
                self._keep(grammar, found)
        if isinstance(found, UsageError):
            raise found.with_traceback(None)
        return found

    def _kept(self, grammar: str) -> "LLMatcher | UsageError | None":
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _keep(self, grammar: str, found: "LLMatcher | UsageError") -> None:
        with self._lock:
            self._compiled[grammar] = found
            self._evict()

    def _evict(self) -> None:
        idle = len(self._compiled) - len(self._held)
        if idle > MAX_COMPILED:
            oldest = (text for text in self._compiled if text not in self._held)
            for text in list(islice(oldest, idle - MAX_COMPILED)):
                del self._compiled[text]

    def _compile(self, grammar: str) -> "LLMatcher":
        llguidance = _library()
        write = {
            "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
            "regex": lambda pattern: f"start: /{llguidance.regex_to_lark(pattern, 'd')}/",  # \\d: 0 to 9
            "lark": llguidance.LLMatcher.grammar_from_lark,
        }
        try:
            form, content = json.loads(grammar)
            known = write[form]
        except (ValueError, TypeError, KeyError):
            raise UsageError(
                "The grammar is none", got=grammar[:80], fix="Write it with a function of engine.structured."
            ) from None
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_COMPILE_FUEL, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
        )
        text = known(content)
        compiled: LLMatcher = llguidance.LLMatcher(self._bridge(), text, log_level=0, limits=limits)
        # the first step is tried: of a grammar that nothing follows, only it tells
        first = compiled.deep_copy()
        if not first.is_error():
            first.compute_bitmask()
        if first.is_error():
            fix = "Correct or simplify it."
            raise UsageError(f"The grammar cannot be used: {_reason(first.get_error())}", fix=fix)
        return compiled

    def _bridge(self) -> "LLTokenizer":
        if self._tokenizer is None:
            if not self._end_ids:
                raise UsageError(
                    "This model has no end token, so no answer could end where its grammar does",
                    fix="Ask without a grammar, or name the token in generation_config.json.",
                )
            try:
                self._tokenizer = _library().LLTokenizer(
                    self._content.decode(), n_vocab=self._num_entries, eos_token=sorted(self._end_ids)
                )
            except Exception as error:  # the library raises whatever its own libraries do
                raise UsageError(
                    f"Grammars do not work with this model's tokenizer: {_reason(str(error))}",
                    fix="Ask without a grammar.",
                ) from None
        return self._tokenizer


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "Grammars need the package llguidance", fix="Install it: pip install 'penstock[serve]'."
        ) from None
    return llguidance


def _reason(message: str) -> str:
    """Keep what a reader needs of the library's messages, which quote whole grammars."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300].removesuffix(".")


def _on_deep_stack(compile_: Callable[[], "LLMatcher"]) -> "LLMatcher | UsageError":
    """Return what is compiled, or its error, from a thread with room for a grammar's deepest chain."""
    done: Future[LLMatcher | UsageError] = Future()

    def run() -> None:
        try:
            done.set_result(compile_())
        except UsageError as error:
            done.set_result(error)
        except BaseException as error:
            done.set_exception(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="penstock-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    try:
        found = done.result(timeout=_COMPILE_S)
    except TimeoutError:
        return UsageError(f"The grammar takes more than {_COMPILE_S:.0f} s to compile", fix="Simplify it.")
    thread.join()
    return found
