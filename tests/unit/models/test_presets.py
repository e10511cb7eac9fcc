"""Presets: each builds without memory and has the published number of parameters."""

from dataclasses import replace

import pytest
import torch
from tests.counted_flops import counted_flops

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.engine.scheduling.groups import blocks_of, cache_groups, rows_of
from penstock.models import FAMILIES
from penstock.models.decoder.config import DecoderConfig
from penstock.models.presets import PRESETS, SOURCES, expanded
from penstock.plan.decode import DecodeJob, device_bytes

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "granite-7b": 6_738_415_616,  # the architecture and vocabulary of Llama 2
    "t5-11b-decoder": 11_000_942_592,  # of our own making
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "granite3-2b": 2_533_531_648,
    "granite3-8b": 8_170_848_256,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo": 12_247_782_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "granite4.0-350m": 352_379_904,
    "granite4.0-1b": 1_631_750_144,
    "granite4.0-micro": 3_402_836_480,
    "granite4.1-3b": 3_402_836_480,
    "granite4.1-8b": 8_380_551_168,
    "granite4.2-30b": 29_276_770_304,
    "granite-swash-2b": 2_144_463_840,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "exaone4.0-1.2b": 1_279_391_488,
    "exaone4.0-32b": 32_003_216_384,
    "glm4-9b-0414": 9_400_279_040,
    "glm4-32b-0414": 32_566_081_536,
    "hunyuan-0.5b": 539_010_048,
    "hunyuan-1.8b": 1_791_080_448,
    "hunyuan-7b": 7_504_568_320,
    "phi3-mini-4k": 3_821_079_552,
    "phi3.5-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "phi4-mini": 3_836_021_760,
    "ministral3-3b": 3_429_006_336,
    "ministral3-8b": 8_489_553_920,
    "devstral-small2-24b": 23_572_403_200,
    "mistral-small3.1-24b": 23_572_403_200,
    "ministral-8b": 8_019_808_256,
    "afm-4.5b": 4_619_184_640,
    "smollm3-3b": 3_075_098_624,
    "seed-oss-36b": 36_151_104_512,
    "glm4-9b-chat": 9_399_951_360,
    "cwm": 32_581_097_472,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "helium1-preview-2b": 2_172_643_840,
    "ernie4.5-0.3b": 360_748_032,
}


def test_every_preset_has_a_published_count():
    assert list(PRESETS) == list(PUBLISHED)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_builds_on_the_meta_device_with_the_published_number_of_parameters(name):
    config = build(DecoderConfig, PRESETS[name])
    with torch.device("meta"):
        model = FAMILIES[config.model_type](config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert config.num_parameters == PUBLISHED[name]
    width = model.layers[0].attention.key.weight.shape[0]
    groups = cache_groups(config.windows, context=5000)
    seen = [min(group.window or 5000, 5000) * len(group.layers) for group in groups]
    held = [device_bytes(DecodeJob(model=config, context_tokens=5000, batch=batch)) for batch in (1, 2)]
    assert held[1] - held[0] == sum(seen) * 2 * 2 * width  # keys and values of 2 bytes
    blocks = blocks_of(5000, [group.window for group in groups], block_size=16, share_tokens=1)
    assert sum(seen) <= blocks * 16 * rows_of(groups) <= 1.25 * sum(seen)


@pytest.mark.parametrize("name", PRESETS)
def test_the_flops_of_a_preset_are_those_of_its_layers_on_the_meta_device(name):
    config = first_layers(build(DecoderConfig, PRESETS[name]))
    with torch.device("meta"):
        model = FAMILIES[config.model_type](config)
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    forward = counted_flops(model, 5000) + 5000 * 2 * vectors  # vectors count as matrices do
    assert 5000 * config.flops_per_token(5000) == 3 * forward


def first_layers(config):
    """Return the first layers alone: two, or as many as there are until each kind has been."""
    kinds = config.layers
    count = max(2, next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds)))
    by_layer = {name: getattr(config, name) for name in ("layer_types", "layer_rope_theta")}
    cut = {name: values[:count] for name, values in by_layer.items() if values is not None}
    return replace(config, num_hidden_layers=count, **cut)


def test_a_preset_of_another_family_than_the_first_says_where_it_was_read():
    older = ("llama", "granite3", "granite-7b", "t5", "mistral-7b", "mistral-nemo", "qwen")
    assert set(SOURCES) == {name for name in PRESETS if not name.startswith(older)}


def test_keys_beside_a_preset_change_it():
    model = expanded({"preset": "llama3.1-405b", "num_hidden_layers": 2, "tie_word_embeddings": True})
    assert "preset" not in model
    config = build(DecoderConfig, model)
    assert (config.num_hidden_layers, config.tie_word_embeddings) == (2, True)
    assert config.hidden_size == 16_384
    assert config.rope_scaling is not None


def test_what_a_preset_has_can_be_taken_away():
    config = build(DecoderConfig, expanded({"preset": "llama3.2-1b", "rope_scaling": "none"}))
    assert config.rope_scaling is None
    assert config.head_dim == 64


@pytest.mark.parametrize(
    ("name", "hint"), [("llama3.1-8B", "Did you mean 'llama3.1-8b'"), (7, "Known: afm-4.5b, cwm")]
)
def test_an_unknown_preset_names_the_nearest(name, hint):
    with pytest.raises(ConfigError, match=hint):
        expanded({"preset": name})
