"""Speculator: small heads that draft the tokens after the next one from the model's hidden state.

The speculator of Wertheimer et al., "Accelerating Production LLMs with Combined Token/Embedding Speculators"
(arXiv:2404.19124). The hidden state at a position predicts the next token; head 0 takes that state and the
embedding of the sampled token, and drafts the one after it; head 1 takes head 0's state and the embedding of
its draft; and so on. Heads on the hidden state alone (Medusa, arXiv:2401.10774) do not know the sampled
tokens, so their drafts do not fit one another.

    state = gelu(norm(project(state) + embed(token)))        logits = output(state)

Sizes, factors and names are those of IBM's speculators on the Hugging Face hub.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ModelError
from penstock.nn.kinds import BIAS, SCALE, ParameterKind

MODEL_TYPE = "mlp_speculator"
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorConfig:
    """Config, with the names of IBM's `config.json`."""

    vocab_size: int
    """Vocabulary of the model that it drafts for."""
    emb_dim: int
    """Hidden size of that model."""
    inner_dim: int
    """Width of the heads' states."""
    n_predict: int
    """Number of heads, each one token further ahead."""
    tie_weights: bool = True
    """True: all heads share embedding, norm and output; False: each has its own."""
    scale_input: bool = True
    """Normalise the model's hidden state, whose scale differs between models."""

    def __post_init__(self) -> None:
        """Raise ModelError for impossible sizes."""
        for name in ("vocab_size", "emb_dim", "inner_dim", "n_predict"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} of a speculator must be at least 1", got=getattr(self, name))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "SpeculatorConfig":
        """Parse `config.json`.

        Raises:
            ModelError: a size is missing or not a whole number.
        """
        sizes = {"vocab_size": 0, "emb_dim": 0, "inner_dim": 0, "n_predict": 0}
        for name in sizes:
            if not isinstance(raw.get(name), int):
                raise ModelError(
                    f"{name} of a speculator must be a whole number",
                    got=raw.get(name),
                    fix="Take config.json from the source of the weights.",
                )
            sizes[name] = raw[name]
        sizes["inner_dim"] = sizes["inner_dim"] or sizes["emb_dim"]  # 0 means equal
        # absent in the first published ones, which have neither
        tie_weights, scale_input = (bool(raw.get(name, False)) for name in ("tie_weights", "scale_input"))
        return cls(**sizes, tie_weights=tie_weights, scale_input=scale_input)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `config.json`, readable by other engines."""
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": MODEL_TYPE,
            **asdict(self),
            "n_candidates": 1,
            "top_k_tokens_per_head": [1] * self.n_predict,
        }


class DraftHead(nn.Module):
    """One head: from a state and the token after it to the next state."""

    def __init__(self, config: SpeculatorConfig, *, inputs: int, like: "DraftHead | None") -> None:
        super().__init__()
        inner = config.inner_dim
        self.project = nn.Linear(inputs, inner, bias=False)
        self.embed: nn.Embedding = nn.Embedding(config.vocab_size, inner) if like is None else like.embed
        self.norm: ShiftedNorm = ShiftedNorm(inner) if like is None else like.norm
        self.output: nn.Linear = (
            nn.Linear(inner, config.vocab_size, bias=False) if like is None else like.output
        )
        keep = 0.5 ** (0.5 / config.n_predict)  # decay of the state: half is left after all heads
        self.token_factor = math.sqrt((1 - keep**2) * inner / 2) / keep

    def forward(
        self, state: Float[Tensor, "... inputs"], token: Int[Tensor, "..."]
    ) -> Float[Tensor, "... inner"]:
        """Return the state after a token."""
        out: Tensor = functional.gelu(self.norm(self.project(state) + self.token_factor * self.embed(token)))
        return out


class ShiftedNorm(nn.Module):
    """RMS normalisation with a learned weight and bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def kinds(self) -> Mapping[str, ParameterKind]:
        """Return the kinds of weight and bias."""
        return {"weight": SCALE, "bias": BIAS}

    def forward(self, x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Normalise over the last dim."""
        out: Tensor = functional.rms_norm(x, self.weight.shape, self.weight, _EPS) + self.bias
        return out


class Speculator(nn.Module):
    """Draft heads, in the order of the tokens that they draft."""

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__()
        self.config = config
        heads: list[DraftHead] = []
        for index in range(config.n_predict):
            head = DraftHead(
                config,
                inputs=config.emb_dim if index == 0 else config.inner_dim,
                like=heads[0] if heads and config.tie_weights else None,
            )
            if config.tie_weights and index > 1:
                head.project = heads[1].project
            heads.append(head)
        self.heads = nn.ModuleList(heads)  # registers them; the next line has their types
        self._heads = tuple(heads)

    def first_state(self, hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        """Return the first head's input, from the model's normalised hidden state."""
        if not self.config.scale_input:
            return hidden
        scaled: Tensor = functional.rms_norm(hidden, hidden.shape[-1:], eps=_EPS) * 0.5**0.5
        return scaled

    def states(
        self, hidden: Float[Tensor, "... hidden"], tokens: Int[Tensor, "heads ..."]
    ) -> Iterator[Float[Tensor, "... inner"]]:
        """Yield each head's state, given the correct tokens; `output` maps it to logits.

        Args:
            tokens: [heads, ...]: for head i the token i + 1 after that of `hidden`.
        """
        state = self.first_state(hidden)
        for head, token in zip(self._heads, tokens, strict=True):
            state = head(state, token)
            yield state

    def output(self, head: int) -> nn.Linear:
        """Return the projection from a head's state to logits."""
        return self._heads[head].output

    def guesses(
        self, hidden: Float[Tensor, "rows hidden"], token: Int[Tensor, "rows"], *, num: int
    ) -> Int[Tensor, "rows num"]:
        """Return the likeliest tokens after `token`; each head uses the draft of the one before."""
        state, found = self.first_state(hidden), []
        for head in self._heads[:num]:
            state = head(state, token)
            token = head.output(state).argmax(-1)
            found.append(token)
        return torch.stack(found, dim=1)

    def initialise(self, *, seed: int) -> None:
        """Initialise the weights: matrices of variance 1 / inputs, embeddings of length 1."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                drawn = torch.randn(module.weight.shape, generator=generator) * module.weight.shape[1] ** -0.5
                with torch.no_grad():
                    module.weight.copy_(drawn)


def stored_names(config: SpeculatorConfig) -> dict[str, str]:
    """Return Penstock's name -> IBM's name of every stored tensor; shared ones are stored once.

    >>> sizes = {"vocab_size": 5, "emb_dim": 4, "inner_dim": 3}
    >>> stored_names(SpeculatorConfig(**sizes, n_predict=3))["heads.1.project.weight"]
    'speculator.proj.1.weight'
    >>> len(stored_names(SpeculatorConfig(**sizes, n_predict=3, tie_weights=False)))
    15
    """
    parts = {"embed.weight": "emb.{}.weight", "norm.weight": "ln.{}.weight", "norm.bias": "ln.{}.bias"}
    parts["output.weight"] = "head.{}.weight"
    names = {}
    for index in range(config.n_predict):
        if index < 2 or not config.tie_weights:
            names[f"heads.{index}.project.weight"] = f"speculator.proj.{index}.weight"
        if index < 1 or not config.tie_weights:
            for ours, theirs in parts.items():
                names[f"heads.{index}.{ours}"] = "speculator." + theirs.format(index)
    return names
