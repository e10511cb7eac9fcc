"""Compiled blocks of a rank without FSDP2 beside those with it: `make soak PART=layouts`."""

import torch
from tests.ranks.test_one_rank import STEPS, corpus, pytestmark, recipe_of, trained

from penstock.testing.ranks import on_ranks

__all__ = ["corpus", "pytestmark"]


def test_compiled_losses_are_those_of_fsdp_within_the_rounding_of_bfloat16(corpus, tmp_path):
    recipes = {
        fsdp: recipe_of(corpus, tmp_path / str(fsdp), compile={"enabled": True}, rows=2)
        for fsdp in (True, False)
    }

    def both(world):
        torch.compiler.reset()
        return [
            trained(recipe, world, with_fsdp=fsdp, backend="inductor")[0] for fsdp, recipe in recipes.items()
        ]

    ((theirs, ours),) = on_ranks(both, ranks=1)
    assert len(ours) == STEPS
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2**-8, atol=0)
