"""Small configurations: one of a plain Llama, and one of each family and of what only some of them have."""

from dataclasses import fields
from itertools import cycle
from typing import Any

from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.layer_kind import LayerKind
from penstock.nn.rope_scaling import RopeScaling


def small_llama(**changes: Any) -> DecoderConfig:  # Any: of whatever type the field is
    """Return a configuration that computes in no time; a test names the sizes that matter to it."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return DecoderConfig(**{**sizes, **changes})


def ministral3_scaling() -> RopeScaling:
    """Return a scaling with factors on queries from position 2 on."""
    return RopeScaling(
        rope_type="yarn", factor=32.0, original_max_position_embeddings=2, llama_4_scaling_beta=0.3
    )


def small_families(**sizes: Any) -> dict[str, DecoderConfig]:  # Any: as in `small_llama`
    """Return name -> configuration, all of these sizes."""
    layers = range(sizes["num_hidden_layers"])
    granite: dict[str, Any] = {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 4.0}
    return {
        "llama": DecoderConfig(**sizes, tie_word_embeddings=True),
        "biases": DecoderConfig(**sizes, attention_bias=True, mlp_bias=True),
        "granite": DecoderConfig(**sizes, model_type="granite", **granite),
        "granite_swa": DecoderConfig(
            **sizes,
            model_type="granite_swa",
            attention_multiplier=0.2,
            sliding_window=5,
            layer_types=tuple("sliding_attention" if layer % 2 else "full_attention" for layer in layers),
            layer_rope_theta=tuple(0.0 if layer % 2 else 10_000.0 for layer in layers),
        ),
        "mistral": DecoderConfig(**sizes, model_type="mistral", sliding_window=5),
        "qwen2": DecoderConfig(**sizes, model_type="qwen2", sliding_window=5, max_window_layers=1),
        "qwen3": DecoderConfig(**sizes, model_type="qwen3", head_dim=16),
        "smollm3": DecoderConfig(
            **sizes,
            model_type="smollm3",
            layer_rope_theta=tuple(0.0 if layer % 2 else 10_000.0 for layer in layers),
        ),
        "olmo2": DecoderConfig(**sizes, model_type="olmo2"),
        "hunyuan": DecoderConfig(**sizes, model_type="hunyuan_v1_dense"),
        "ministral3": DecoderConfig(**sizes, model_type="ministral3", rope_scaling=ministral3_scaling()),
        "glm4": DecoderConfig(**sizes, model_type="glm4", attention_bias=True, partial_rotary_factor=0.5),
        "gemma": DecoderConfig(**sizes, model_type="gemma", tie_word_embeddings=True),
        "gemma2": DecoderConfig(
            **sizes,
            model_type="gemma2",
            sliding_window=5,
            layer_types=tuple("full_attention" if layer % 2 else "sliding_attention" for layer in layers),
            attn_logit_softcapping=0.1,
            final_logit_softcapping=0.2,
        ),
        "arcee": DecoderConfig(**sizes, model_type="arcee", mlp_bias=True),
    }


def mixed(config: DecoderConfig, *parts: str) -> DecoderConfig:
    """Return the config of a network whose layers have these parts, in turn: "attention", "mlp" or "both".

    No family has such layers yet.
    """

    class Mixed(DecoderConfig):
        __slots__ = ()

        @property
        def layers(self) -> tuple[LayerKind, ...]:
            attentions = DecoderConfig.layers.fget(self)  # type: ignore[attr-defined]  # of a property
            return tuple(
                LayerKind(
                    attention=None if some == "mlp" else kind.attention,
                    feed_forward=None if some == "attention" else "mlp",
                )
                for kind, some in zip(attentions, cycle(parts), strict=False)
            )

    return Mixed(**{field.name: getattr(config, field.name) for field in fields(config)})
