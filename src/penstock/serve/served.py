"""What is served: a model's name, its words and its sizes, and everything a route needs of them."""

from dataclasses import dataclass, field, replace

from penstock.core.errors import UsageError
from penstock.engine.request import Request
from penstock.engine.sampling import Sampling
from penstock.engine.words import Words
from penstock.serve.body import Bodies
from penstock.serve.bridge import Bridge
from penstock.serve.errors import ApiError, ending
from penstock.serve.limits import Limits
from penstock.serve.metrics import Metrics
from penstock.serve.token_names import TokenNames
from penstock.text.template_process import TemplateProcess

API_SAMPLING = Sampling(temperature=1.0, top_p=1.0)
"""As the API has it."""


def recommended_sampling(words: Words) -> Sampling:
    """Return how a model's authors say it should draw, and where they do not, how the API does.

    Raises:
        UsageError: nothing could be drawn so.
    """
    try:
        return replace(API_SAMPLING, **words.sampling)  # type: ignore[arg-type]
    except UsageError as error:
        fix = "Correct that file, or serve with --api-sampling."
        raise UsageError(f"generation_config.json: {str(error).rstrip('.')}", fix=fix) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as its clients know it."""

    name: str
    """What requests call it."""
    words: Words
    """Between text and tokens."""
    context: int
    """Tokens of prompt and answer."""
    vocab_size: int
    """Token ids are below this."""
    adapters: tuple[str, ...] = ()
    """Names that requests may give instead, each for the model with that adapter."""
    created: int = 0
    """When it was opened, in seconds since 1970."""
    sampling: Sampling = API_SAMPLING
    """What a request leaves out is as here."""

    splits_reasoning: bool = False
    """Whether chats have what the model thought apart from what it says."""

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request's `model` means.

        Raises:
            ApiError: 404, with the names there are.
        """
        if model is None or model == self.name:
            return None
        if model in self.adapters:
            return model
        known = ", ".join((self.name, *self.adapters))
        raise ApiError(
            404,
            f"There is no model {model!r} here; there is {known}.",
            param="model",
            code="model_not_found",
        )


@dataclass(slots=True, kw_only=True)
class Service:
    """What routes find in `request.app.state.service`."""

    served: Served
    bridge: Bridge
    limits: Limits
    bodies: Bodies
    metrics: Metrics
    templates: TemplateProcess
    names: TokenNames
    draining: bool = field(default=False)
    """Whether requests that begin now are refused, because the server is about to end."""

    def checked(self, request: Request) -> Request:
        """Return a request that can be answered; not for the event loop: new grammars and names take time.

        Raises:
            UsageError: it never could.
        """
        self.bridge.engine.check(request)
        if request.sampling.num_logprobs is not None:
            self.names.learn()
        return request

    def check_open(self) -> None:
        """Refuse a request that the server would not live to answer.

        Raises:
            ApiError: 503.
        """
        if self.bridge.engine.failure is not None:
            raise ApiError(503, f"The engine has failed: {self.bridge.engine.failure}", code="engine_failed")
        if self.draining:
            raise ending()
