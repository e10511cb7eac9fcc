"""Constrained decoding: the tokens that a grammar allows next, computed by llguidance.

A grammar is compiled when its request arrives, in a thread of its own and outside the engine's steps, and
cached by its text; each answer starts from a copy. At each step a matcher computes the mask of allowed
tokens, which takes tens of microseconds for most grammars. Grammars come from clients, so the cost of
compiling and masking is limited (docs/adr/0029).
"""

import json
import re
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
"""Cached grammars besides those of open requests; the least recently used one is evicted."""

_STACK_BYTES = 512 * 2**20
"""Stack of the compiling thread: llguidance recurses for each rule that names another, and a chain of some
hundred rules overflows 8 MiB and ends the process. Only touched pages take memory."""

_COMPILE_S = 20.0
"""Time limit of a compilation; its thread cannot be stopped, but the grammar is remembered as refused."""

_MAX_GIVEN_UP = 2
"""Compilations that were given up and still run. No other begins meanwhile: each takes a core, and tens of
megabytes a second."""

_COMPILE_FUEL = 100_000
_STEP_FUEL = 50_000
"""Limits in llguidance's units: the worst grammars found took 0.2 s to compile, tens of ms a step."""


class GrammarMatcher:
    """Grammar state of one answer; for one thread at a time."""

    def __init__(self, matcher: "LLMatcher", *, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._num_consumed = 0

    def allowed(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> np.ndarray | str:
        """Return the allowed next tokens, [vocab_size] bool, or why the grammar cannot be continued.

        Args:
            tokens: all tokens of the answer so far; those of the last call are a prefix.
            drafts: draft tokens after it; after one that is not allowed the result is meaningless.
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


class GrammarCompiler:
    """Compiles grammars for one tokenizer, with a cache; thread-safe.

    Args:
        vocab_size: logits of the model; ids of the tokenizer beyond them are never allowed.
        end_ids: end tokens, allowed where a grammar is complete. Some folders name such as cannot be
            sampled: they are left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Collection[int]) -> None:
        self._content = tokenizer.content
        self._num_entries = max(vocab_size, tokenizer.vocab_size)
        self._vocab_size = vocab_size
        known_ids = min(vocab_size, tokenizer.vocab_size)
        self._end_ids = frozenset(end for end in end_ids if end < known_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher | UsageError] = OrderedDict()
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._given_up: list[threading.Thread] = []

    def check(self, request: Request) -> None:
        """Raise for a grammar that cannot be used; compiles it unless it is cached.

        Raises:
            UsageError: it is not a grammar, matches nothing, is too large (with llguidance's message), or
                the request's stop_ids and min_tokens contradict it.
        """
        if request.sampling.min_tokens:
            raise UsageError(
                "min_tokens cannot be combined with a grammar, which decides where an answer ends",
                got=request.sampling.min_tokens,
                fix="Leave one of them out.",
            )
        if not self._end_ids.issubset(request.stop_ids):
            raise UsageError(
                "An answer that follows a grammar ends with the model's end token, missing in stop_ids",
                got=sorted(request.stop_ids),
                fix=f"Add {sorted(self._end_ids)}, or leave the grammar out.",
            )
        assert request.grammar is not None
        self._prototype(request.grammar)

    def hold(self, request: Request) -> None:
        """Keep a request's grammar cached until `release`, so that no step has to compile it."""
        if request.grammar is not None:
            with self._lock:
                self._held[request.grammar] += 1

    def release(self, request: Request) -> None:
        """Undo `hold` for a finished request."""
        if request.grammar is not None:
            with self._lock:
                self._held[request.grammar] -= 1
                self._held += Counter()  # drops zero counts
                self._evict()

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Return a new matcher at the start of a grammar; raises as `check` does."""
        copy = self._prototype(grammar).deep_copy()
        return GrammarMatcher(copy, vocab_size=self._vocab_size, end_ids=self._end_ids)

    def _prototype(self, grammar: str) -> "LLMatcher":
        found = self._kept(grammar)
        if found is None:
            with self._compiling:  # one at a time: compilations are short, and the cores have other work
                found = self._kept(grammar)
                if found is None:
                    found = self._compiled_within_limits(grammar)
                    self._keep(grammar, found)
        if isinstance(found, UsageError):
            raise found.with_traceback(None)
        return found

    def _compiled_within_limits(self, grammar: str) -> "LLMatcher | UsageError":
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        if len(self._given_up) >= _MAX_GIVEN_UP:
            raise UsageError(
                "No new grammar can be compiled while others take too long",
                got=f"{len(self._given_up)} above {_COMPILE_S:.0f} s",
                fix="Ask again later, or use a grammar that was used before.",
            )
        found, thread = _on_deep_stack(lambda: self._compile(grammar))
        if thread.is_alive():
            self._given_up.append(thread)
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
                "The grammar has no known form",
                got=grammar[:80],
                fix="Write it with a function of engine.sampling.grammar_text.",
            ) from None
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_COMPILE_FUEL, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
        )
        bridge = self._bridge()
        try:
            compiled: LLMatcher = llguidance.LLMatcher(bridge, known(content), log_level=0, limits=limits)
            # compute a first mask: only then is it known whether anything matches
            first = compiled.deep_copy()
            if not first.is_error():
                first.compute_bitmask()
            wrong = first.get_error() if first.is_error() else None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # numbers beyond 64 bits; a Rust panic is not an Exception
            wrong = str(error) or repr(error)
        if wrong is not None and form == "regex":
            raise UsageError(
                f"The regular expression cannot be used: {_reason_of_regex(wrong)}",
                got=content if len(content) <= _MAX_SHOWN else f"{content[:_MAX_SHOWN]}...",
                fix="Correct or simplify it; the syntax is that of Rust's regex, without look-around.",
            )
        if wrong is not None:
            fix = "Correct or simplify it."
            raise UsageError(f"The grammar cannot be used: {_reason(wrong)}", fix=fix)
        return compiled

    def _bridge(self) -> "LLTokenizer":
        if self._tokenizer is None:
            if not self._end_ids:
                raise UsageError(
                    "This model has no end token, so no answer could end where its grammar ends",
                    fix="Leave the grammar out, or name the token in generation_config.json.",
                )
            try:
                self._tokenizer = _library().LLTokenizer(
                    self._content.decode(), n_vocab=self._num_entries, eos_token=sorted(self._end_ids)
                )
            except Exception as error:  # the library raises what its own libraries raise
                raise UsageError(
                    f"Grammars are not supported for this model's tokenizer: {_reason(str(error))}",
                    fix="Leave the grammar out.",
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
    """Shorten a message of the library, without the grammar that it quotes."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return _WRAPPED.sub("#", _QUOTED.sub("", text).rpartition(_OF_SCHEMA)[2])[:300].removesuffix(".")


def _reason_of_regex(message: str) -> str:
    """Return what is wrong with a regular expression, without the grammar that was made of it.

    >>> _reason_of_regex('at 1(8): invalid regex "(" (in regex): ( ^ error: unclosed group')
    'unclosed group'
    """
    if "NoExtensionBias" in message:
        return "no text matches it"
    _, is_parsed, why = message.rpartition("error: ")
    return _reason(why) if is_parsed else _reason(message.partition("(in regex): ")[2] or message)


_MAX_SHOWN = 200
_QUOTED = re.compile(r" 1 \| .*")
_OF_SCHEMA = "failed to compile JSON schema: "
_WRAPPED = re.compile(r"/anyOf/\d+/properties/arguments(?=/)")
"""Where the schema of a function's arguments is in that of all calls."""


def _on_deep_stack(compile_: Callable[[], "LLMatcher"]) -> "tuple[LLMatcher | UsageError, threading.Thread]":
    """Compile in a thread with a large stack; return the result or its UsageError, and the thread."""
    done: Future[LLMatcher | UsageError] = Future()

    def run() -> None:
        try:
            done.set_result(compile_())
        except UsageError as error:
            done.set_result(error)
        except BaseException as error:  # a panic of Rust too: the thread that waits raises it
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
        late = UsageError(f"The grammar takes more than {_COMPILE_S:.0f} s to compile", fix="Simplify it.")
        return late, thread
    thread.join()
    return found, thread
