"""Application state: served model, text processor, limits, engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.core import clock
from penstock.core.errors import GrammarRefused, UsageError
from penstock.engine.request import Request
from penstock.engine.sampling import grammar_text
from penstock.engine.sampling_params import Sampling
from penstock.engine.text_processor import TextProcessor
from penstock.serve.chat.unusable import Refusal
from penstock.serve.errors import ApiError, api_error_of, ending, named_key
from penstock.serve.limits import ServerLimits
from penstock.serve.metrics import Metrics
from penstock.serve.output_stream import Bridge
from penstock.serve.request_body import Bodies
from penstock.serve.schema.base import ANY_JSON
from penstock.serve.token_strings import TokenNames
from penstock.text.template_process import TemplateProcess

_REFUSED, _FIX = "The grammar cannot be used: ", " Correct or simplify it."
_SEARCH_S = 2.0

API_SAMPLING = Sampling()
"""Defaults of the OpenAI API: temperature 1, all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model, or one of its adapters, as clients see it."""

    name: str
    """Name in requests."""
    adapter: str | None = None
    """The adapter's name in the engine; None: the model itself."""
    text_processor: TextProcessor
    """Tokenizer and chat template."""
    templates: TemplateProcess
    """Renders that chat template."""
    names: TokenNames
    """Strings of its tokens."""
    context: int
    """Maximum tokens of prompt and answer together."""
    vocab_size: int
    """Number of token ids."""
    adapters: Mapping[str, "ModelInfo"] = field(default_factory=dict)
    """LoRA adapters that requests can name as their model."""
    created: int = 0
    """Unix time of the start, in seconds."""
    sampling: Sampling = API_SAMPLING
    """Defaults for values that requests leave out."""
    splits_reasoning: bool = False
    """True if chat answers have the reasoning in `reasoning_content`."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of the model's config.json that were passed over, though Penstock does not read them."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Operation -> name of the kernel that computes it, where several could."""

    def of(self, model: str | None) -> "ModelInfo":
        """Return the adapter that a request's `model` names; this model if it names none.

        Raises:
            ApiError: 404, with the known names.
        """
        if model is None or model == self.name:
            return self
        if model in self.adapters:
            return self.adapters[model]
        known = ", ".join((self.name, *self.adapters))
        raise ApiError(
            f"There is no model {model!r} here; there is {known}.",
            status=404,
            param="model",
            code="model_not_found",
        )


@dataclass(slots=True, kw_only=True)
class AppState:
    """Shared state of the routes, in `request.app.state.service`."""

    served: ModelInfo
    bridge: Bridge
    limits: ServerLimits
    bodies: Bodies
    metrics: Metrics
    draining: bool = field(default=False)
    """True while the server shuts down: new requests are refused."""

    def checked(self, request: Request, *, grammar_key: str) -> Request:
        """Return a request that can be computed; may compile a grammar, so not for the event loop.

        Args:
            grammar_key: what asks for its grammar, for messages.

        Raises:
            UsageError: it can never be computed.
            ApiError: its grammar cannot be used.
        """
        try:
            self.bridge.engine.check(request)
        except GrammarRefused as error:
            raise api_error_of(error, param=named_key(error, ["min_tokens"]) or grammar_key) from None
        if request.sampling.num_logprobs is not None or request.num_prompt_logprobs is not None:
            self.served.of(request.adapter).names.learn()
        return request

    def refusal(self, request: Request) -> Refusal:
        """Return a function that says why an answer cannot follow a schema; after 2 s it returns None."""
        ends_s = clock.monotonic() + _SEARCH_S

        def why(schema: Mapping[str, ANY_JSON]) -> str | None:
            if clock.monotonic() > ends_s:
                return None
            try:
                self.bridge.engine.check(replace(request, grammar=grammar_text.json_schema(schema)))
            except UsageError as error:
                return str(error).removeprefix(_REFUSED).removesuffix(_FIX)
            return None

        return why

    def close(self) -> None:
        """End the processes of the chat templates; the caller closes the engine. Idempotent."""
        for one in (self.served, *self.served.adapters.values()):
            one.templates.close()

    def check_open(self) -> None:
        """Refuse a request if the engine has failed or the server is draining.

        Raises:
            ApiError: 503.
        """
        if self.bridge.engine.failure is not None:
            raise ApiError(
                f"The engine has failed: {self.bridge.engine.failure}", status=503, code="engine_failed"
            )
        if self.draining:
            raise ending()
