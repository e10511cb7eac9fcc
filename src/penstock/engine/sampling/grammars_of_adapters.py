"""Grammars of an engine's requests: each is compiled for the tokenizer and the end tokens of its adapter."""

from penstock.core.errors import UsageError
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
        self._compilers: dict[str | None, tuple[_Key, GrammarCompiler]] = {}  # by adapter
        self.add(None, text_processor, vocab_size=vocab_size)

    def add(self, adapter: str | None, text_processor: TextProcessor, *, vocab_size: int) -> None:
        """Prepare for the requests of an adapter; those alike share a compiler."""
        key = text_processor.tokenizer.fingerprint, vocab_size, text_processor.stop_ids
        found = next((one for other, one in self._compilers.values() if other == key), None)
        if found is None:
            tokenizer, ends = text_processor.tokenizer, text_processor.stop_ids
            found = GrammarCompiler(tokenizer, vocab_size=vocab_size, end_ids=ends)
        self._compilers[adapter] = key, found

    def remove(self, adapter: str) -> None:
        """Undo `add` for an adapter that no request uses."""
        del self._compilers[adapter]

    def check(self, request: Request) -> None:
        """Raise for a grammar that cannot be used, as `GrammarCompiler.check` does; may take seconds.

        Raises:
            UsageError: also if the adapter was removed.
        """
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
        found = self._compilers.get(request.adapter)
        if found is None:  # removed since another thread looked for it
            raise UsageError("Unknown adapter", got=request.adapter, fix="It was removed.")
        return found[1]
