"""Model families as data: their keys of `config.json`, features and stored tensors; no torch.

All families are one network (models/decoder): blocks of attention and a feed-forward layer. They differ in
norms, biases, activations, attention windows, rotary embedding, a few factors, and in how their tensors are
stored.

A family also says what each key of a `config.json` means. A key is read, or harmless at one value, or
bookkeeping; any other key may change what the model computes, and is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from penstock.models.family.tensors import TensorLayout

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig
    from penstock.nn.mlp import Activation

IGNORED_KEYS = "penstock_ignored_keys"
"""Key of config.json that lists the keys that were passed over when the original folder was opened."""

SIZES = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
)
"""Keys without a default: a config.json that lacks one is refused."""

QUANTISATION = ("quantization_config", "quantization")
"""Keys that say how weights are quantised: of transformers, and of MLX."""

READ = SIZES | {
    "model_type", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "hidden_act", *QUANTISATION, "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", IGNORED_KEYS,
}  # fmt: skip
"""Keys that are read for every family."""

BOOKKEEPING = frozenset(
    {
        # who wrote the file, and with which classes
        "architectures", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash",
        "unsloth_fixed", "unsloth_version", "model_name", "is_composition", "transformers.js_config",
        "tokenizer_class",
        # dtype, initial values, dropout, and noise in training: weights are read in their own dtype, and
        # Penstock has neither dropout nor noise
        "use_bfloat16", "neftune_noise_alpha", "tf_legacy_loss",
        "dtype", "torch_dtype", "initializer_range", "attention_dropout", "classifier_dropout",
        # special tokens and lengths: read from the tokenizer's files and generation_config.json
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        "model_max_length", "max_sequence_length",
        # how a forward pass is run, and what it returns
        "use_cache", "pretraining_tp", "gradient_checkpointing", "is_decoder", "torchscript", "return_dict",
        "cache_implementation",
        "output_attentions", "output_hidden_states", "_attn_implementation", "attn_implementation",
        "_attn_implementation_autoset", "_experts_implementation", "_flash_attn_2_enabled",
        # labels of classifiers, whose weights are refused by name
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
        # read where embeddings are served
        "is_matryoshka", "matryoshka_dimensions",
        # how answers are drawn: transformers 4 kept the fields of GenerationConfig here
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
        "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p",
        "typical_p",
    }
)  # fmt: skip
"""Keys that say nothing of what the network computes, at any value."""

DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_parameters": None,
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
}
"""Defaults that transformers' classes share."""

SIZES_OF_LLAMA: Mapping[str, int] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""Sizes in transformers' class of Llama, which several classes were copied from."""

Raw = Mapping[str, Any]  # Any: JSON
Projection = Literal["query", "key", "value", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Features of one family."""

    architecture: str
    """Class name in transformers."""
    limits: str = ""
    """What of the family does not open, for docs/reference/models.md."""
    own_keys: frozenset[str] = frozenset()
    """Keys of config.json that are read besides READ."""
    defaults: Mapping[str, object]
    """Key -> its value in transformers' class where config.json lacks it. A key that is not read changes
    nothing at this value."""
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Keys of SIZES that a `text_config` may leave out -> their values in transformers' class. transformers 4
    wrote them where they differ from these."""
    default_rope: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """`rope_parameters` of transformers' class where config.json has none."""
    rope_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Rules of rotary scaling that the family calls by another name: its name -> `RopeType`."""
    ignored: frozenset[str] = BOOKKEEPING
    """Keys of config.json that are harmless at any value."""
    own_code: str = ""
    """Module of Python that published folders bring (`auto_map`), and that computes what transformers' class
    does."""
    settings: frozenset[str] = frozenset()
    """Fields of NEUTRAL that the family has; those of `own_keys` are read and written by their own names."""
    full_rope: Callable[[Raw], Raw] = lambda raw: raw
    """From config.json to one whose rotary embedding is that of full layers, where kinds of layers differ."""
    read: Callable[[Raw], Raw] = lambda _raw: MappingProxyType({})
    """From config.json with defaults to fields of the network's config whose values need more than a copy."""
    write: Callable[["DecoderConfig"], Raw] = lambda _config: MappingProxyType({})
    """From the network's config to keys of config.json that `read` understands."""
    check: Callable[["DecoderConfig"], None] = lambda _config: None
    """Raises ConfigError for a config that `write` could not describe."""
    biases: Literal["never", "always", "chosen"] = "never"
    """Whether attention projections have biases; "chosen": if `attention_bias` is set."""
    biased: tuple[Projection, ...] = ("query", "key", "value", "output")
    """Projections that then have one."""
    rotates_part: bool = False
    """True if `partial_rotary_factor` is a key of the family, and above 0."""
    qk_norm: Literal["head", "whole", "rotated"] | None = None
    """Norms of queries and keys before rotary embedding: of each head by itself, or of all heads together; or
    of each head after it."""
    scales_queries: bool = False
    """True if `llama_4_scaling_beta` is a key of the family's rotary scaling."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms of a block: before attention and feed-forward, after them (before the residual sum), or both."""
    has_sinks: bool = False
    """True if each query head has an attention sink (nn/kernels/sinks.py)."""
    has_zero_centered_norms: bool = False
    """True if the weights of all norms are stored less 1."""
    activation: "Activation" = "silu"
    """Activation of the feed-forward layer."""
    activation_key: str = "hidden_act"
    """Key of config.json that names it."""
    activation_names: tuple[str, ...] = ("silu", "swish")
    """Its names in config.json; the first is written."""
    has_gate: bool = True
    """True if the activation is of a gate that multiplies the feed-forward's inner layer."""
    scales_embeddings: bool = False
    """True if embeddings are multiplied by the root of their width, rounded to their dtype."""
    tensors: TensorLayout = field(default_factory=TensorLayout)
    """How weights are stored."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of config.json that are read."""
        return READ | self.own_keys

    @property
    def fields(self) -> frozenset[str]:
        """Fields of NEUTRAL that the family has."""
        return self.settings | (self.own_keys & NEUTRAL.keys())

    def is_harmless(self, key: str, value: object) -> bool:
        """Return True if a key changes nothing at this value, or is read.

        >>> from penstock.models.families import FAMILY
        >>> FAMILY["qwen2"].is_harmless("use_mrope", False), FAMILY["qwen2"].is_harmless("use_mrope", True)
        (True, False)
        """
        if value is None or key in self.keys or key in self.ignored:
            return True
        if key == "auto_map":
            return self._is_own_code(value)
        own = {"use_qk_norm": self.qk_norm is not None, "activation": self._gate_name}
        neutral = {**NEUTRAL, **_NEUTRAL_ELSEWHERE, **own, **self.defaults}
        return key in neutral and value == neutral[key]

    @property
    def _gate_name(self) -> str | None:
        """The feed-forward layer as Falcon 3 names it; None: it has no such name."""
        return "swiglu" if self.has_gate and self.activation == "silu" else None

    def _is_own_code(self, classes: object) -> bool:
        """Return True if the models of an `auto_map` are all in `own_code`."""
        if not self.own_code or not isinstance(classes, Mapping):
            return False
        models = [str(name) for auto, name in classes.items() if str(auto).startswith("AutoModel")]
        return all(name.rpartition("--")[2].partition(".")[0] == self.own_code for name in models)


NEUTRAL: Mapping[str, object] = {
    "attention_bias": False,
    "attention_out_bias": None,
    "mlp_bias": False,
    "sliding_window": None,
    "max_window_layers": 0,
    "layer_types": None,
    "layer_rope_theta": None,
    "scaled_layers": None,
    "partial_rotary_factor": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
"""Fields that only some families support, with their neutral values."""

_NEUTRAL_ELSEWHERE: Mapping[str, object] = {
    "add_classification_head": False,
    "add_cross_attention": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_causal": True,
    "is_llama_config": True,
    "lm_head_bias": False,
    "norm_type": "rms",
    "normalization_function": "rmsnorm",
    "parallel_attn": False,
    "pruned_heads": {},
    "qk_layer_norms": False,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_cla": False,
    "use_mrope": False,
    "use_resampler": False,
    "use_rotary_pos_emb": True,
}
"""Keys of published folders that these classes of transformers do not have, with their neutral values."""
