"""Grammars of an engine's requests: each is compiled for the tokenizer and the end tokens of its adapter."""

from penstock.engine.request import Request
from penstock.engine.sampling.grammars import GrammarCompiler, GrammarMatcher
from penstock.engine.text_processor import TextProcessor

_Key = tuple[str, int, frozenset[int]]


class GrammarsOfAdapters:
    """A compiler for each vocabulary and set of end tokens that the model and its adapters have; thread-safe.

    Args:
        text_processor: of the model.
        vocab_size: its token ids.
    """

    def __init__(self, text_processor: TextProcessor, *, vocab_size: int) -> None:
        self._compilers: dict[_Key, GrammarCompiler] = {}
        self._keys: dict[str | None, _Key] = {}  # by adapter
        self.add(None, text_processor, vocab_size=vocab_size)

    def add(self, adapter: str | None, text_processor: TextProcessor, *, vocab_size: int) -> None:
        """Prepare for the requests of an adapter; those alike share a compiler."""
        key = text_processor.tokenizer.fingerprint, vocab_size, text_processor.stop_ids
        if key not in self._compilers:
            tokenizer, ends = text_processor.tokenizer, text_processor.stop_ids
            self._compilers[key] = GrammarCompiler(tokenizer, vocab_size=vocab_size, end_ids=ends)
        self._keys[adapter] = key

    def remove(self, adapter: str) -> None:
        """Undo `add` for an adapter that no request uses."""
        key = self._keys.pop(adapter)
        if key not in self._keys.values():
            del self._compilers[key]

    def check(self, request: Request) -> None:
        """Raise for a grammar that cannot be used, as `GrammarCompiler.check` does; may take seconds."""
        self._of(request).check(request)

    def hold(self, request: Request) -> None:
        """Keep a request's grammar compiled until `release`."""
        self._of(request).hold(request)

    def release(self, request: Request) -> None:
        """Undo `hold` for a finished request."""
        self._of(request).release(request)

    def matcher(self, request: Request) -> GrammarMatcher:
        """Return a new matcher at the start of a request's grammar."""
        assert request.grammar is not None, request
        return self._of(request).matcher(request.grammar)

    def _of(self, request: Request) -> GrammarCompiler:
        return self._compilers[self._keys[request.adapter]]
