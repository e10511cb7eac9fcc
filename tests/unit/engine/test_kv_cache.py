"""The cache: positions in order, room that grows without losing any."""

import torch

from penstock.engine.kv_cache import FIRST_ROOM, LayerKV


def test_appended_positions_come_back_in_order_across_growth():
    generator, layer = torch.Generator().manual_seed(0), LayerKV()
    parts = [torch.randn(2, 3, n, 4, generator=generator) for n in (5, 1, FIRST_ROOM, 1, 3 * FIRST_ROOM, 1)]
    for count in range(1, len(parts) + 1):
        keys, values = layer.append(parts[count - 1], -parts[count - 1])
        assert torch.equal(keys, torch.cat(parts[:count], 2))
        assert torch.equal(values, -keys)


def test_a_cache_keeps_the_type_of_what_it_holds():
    keys, _ = LayerKV().append(*torch.zeros(2, 1, 1, 1, 2, dtype=torch.bfloat16))
    assert keys.dtype == torch.bfloat16
