"""What the queries of a stretch may see, against the mask of whole rows."""

import pytest
import torch

from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from penstock.parallel.context import stretch_mask

ENDS = torch.tensor([0, 3, 8, 12, 13, 24], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("ends", [None, ENDS], ids=["rows", "documents"])
@pytest.mark.parametrize("index", range(3))
def test_a_stretch_sees_what_its_rows_of_the_whole_mask_say(index, ends, window):
    whole = AttentionLayout(batch=2, seq_len=12, cu_seqlens=ends, window=window)
    first, past = 4 * index, 4 * (index + 1)
    expected = visibility_mask(whole, device=torch.device("cpu"))
    found = stretch_mask(whole, first, past, device=torch.device("cpu"))
    assert found.equal(expected[:, :, first:past, :past])
    assert not expected[:, :, first:past, past:].any(), "no later key is seen"
