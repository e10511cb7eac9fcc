"""A rank that shares parameters with no other trains without FSDP2, to the bit as with it."""

from functools import partial

import pytest
import torch
from tests.peft_loop import folder_of
from tests.rank_batches import RankBatches, import_compiler
from transformers import Qwen3Config

from penstock.nn.dtensor import detached_local
from penstock.parallel import apply as apply_module
from penstock.parallel.apply import compile_blocks
from penstock.testing.corpora import write_corpus
from penstock.testing.training import records_of
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
VOCAB, STEPS = 48, 3
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "model_type": "qwen3",
}
ONE_BLOCK = {"num_hidden_layers": 1}  # each block is compiled by itself
WAYS = {
    "float32": {"compute": "float32"},
    "bfloat16": {},
    "micro-batches": {"rows": 1},
    "tied": {"model": {"tie_word_embeddings": True}, "rows": 2},
    "masters": {"precision": {"weights": "bfloat16_master"}, "rows": 1},
    "rounded at random": {"precision": {"weights": "bfloat16_stochastic"}},
    "adapter": {"tune": {"method": "lora", "rank": 4}, "rows": 1, "starts": True},
    "int8 base": {"tune": {"method": "lora", "rank": 4, "base": "int8"}, "starts": True},
    "recomputed": {"recompute": {"policy": "full"}, "rows": 2},
    "operators recomputed": {"recompute": {"policy": "operators"}},
    "compiled": {"compile": {"enabled": True}, "model": ONE_BLOCK, "rows": 2},
    "compiled, recomputed": {
        "compile": {"enabled": True},
        "model": ONE_BLOCK,
        "recompute": {"policy": "operators"},
    },
    "8 bits": {"precision": {"linear": "float8_rowwise"}},
    "tensor": {"parallel": {"tensor": 2}, "ranks": 2},
    "pipeline": {"parallel": {"pipeline": 2}, "ranks": 2, "rows": 2},
    "tied pipeline": {
        "parallel": {"pipeline": 2},
        "ranks": 2,
        "rows": 2,
        "model": {"tie_word_embeddings": True},
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        for length in torch.randint(1, 60, (200,), generator=generator).tolist()
    ]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    shape = {name: size for name, size in MODEL.items() if name != "model_type"}
    return folder_of(
        tmp_path_factory.mktemp("base") / "qwen3", Qwen3Config(**shape, head_dim=8, vocab_size=VOCAB)
    )


def recipe_of(corpus, folder, *, rows=None, model=None, start_from="", **sections):
    shape = {} if start_from else {"model": MODEL | (model or {})}
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": STEPS, "start_from": str(start_from)},
            **shape,
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 24,
                "global_batch_size": 4,
                "micro_batch_size": rows,
            },
            "optim": {"learning_rate": 5e-3, "clip_norm": 0.5},
            "schedule": {"rule": "constant"},
            "compute": "bfloat16",
        }
        | sections
    )


def trained(recipe, world, *, with_fsdp, backend="aot_eager", stop_at=None):
    """Return the loss and gradient norm of each step, and the tensors of a checkpoint after the last.

    By default blocks are traced and not compiled: programs round as they like, differently around the casts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply_module, "compile_blocks", partial(compile_blocks, backend=backend))
        if with_fsdp:
            patch.setattr(apply_module, "has_work", lambda *_, **__: True)
        state = open_state(recipe, world)
        records = records_of(state, recipe, world, stop_at=stop_at)
    steps = [(record["loss"], record["grad_norm"]) for record in records if "loss" in record]
    return steps, {name: detached_local(tensor).clone() for name, tensor in state.tensors().items()}


@pytest.fixture(scope="module")
def found(corpus, base, tmp_path_factory):
    """What each way trains with FSDP and without, by rank."""
    folder = tmp_path_factory.mktemp("ways")
    import_compiler()

    def both(way, world):
        settings = {name: of for name, of in WAYS[way].items() if name not in ("ranks", "starts")}
        start = base if "starts" in WAYS[way] else ""
        torch.compiler.reset()
        return [
            trained(
                recipe_of(corpus, folder / f"{way}-{fsdp}", start_from=start, **settings),
                world,
                with_fsdp=fsdp,
            )
            for fsdp in (True, False)
        ]

    return RankBatches({way: settings.get("ranks", 1) for way, settings in WAYS.items()}, both)


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_weights_are_those_of_fsdp_to_the_bit(way, found):
    """In bfloat16, but where it says float32."""
    for (their_steps, theirs), (our_steps, ours) in found.of(way):
        assert our_steps == their_steps
        assert ours.keys() == theirs.keys()
        different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not different


REOPENED = {
    f"{way}, {'with' if first_with_fsdp else 'without'} FSDP first": (way, first_with_fsdp)
    for way in ("bfloat16", "masters", "tied")
    for first_with_fsdp in (True, False)
}


@pytest.fixture(scope="module")
def reopened(corpus, tmp_path_factory):
    """What a way trains whose first step is with FSDP, or the rest of them, in the same process."""
    recipes = {
        case: recipe_of(corpus, tmp_path_factory.mktemp("parts"), **WAYS[way])
        for case, (way, _) in REOPENED.items()
    }

    def in_turn(case, world):
        _, with_fsdp = REOPENED[case]
        first, _ = trained(recipes[case], world, with_fsdp=with_fsdp, stop_at=1)
        rest, tensors = trained(recipes[case], world, with_fsdp=not with_fsdp)
        return first + rest, tensors

    return RankBatches(dict.fromkeys(REOPENED, 1), in_turn)


@pytest.mark.parametrize("case", REOPENED)
def test_a_checkpoint_of_each_opens_in_the_other_with_every_bit(reopened, found, case):
    way, _ = REOPENED[case]
    ((_, (expected, theirs)),) = found.of(way)
    ((steps, ours),) = reopened.of(case)
    assert steps == expected
    assert len(steps) == STEPS
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
