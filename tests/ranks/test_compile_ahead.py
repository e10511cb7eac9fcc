"""A run over a mixed corpus compiles everything before its first step, whatever its layout.

Rows of some micro-batches are one document each, those of others hold several, and some steps validate.
"""

from functools import partial

import pytest
import torch
from tests.rank_batches import RankBatches, import_compiler

from penstock.nn.kernels.varlen_cpu import per_document
from penstock.obs.meter import StepMeter
from penstock.parallel import apply as apply_module
from penstock.parallel.apply import compile_blocks
from penstock.testing.corpora import write_corpus
from penstock.train.loop import train
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
VOCAB, LENGTH, STEPS = 48, 24, 4
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WAYS = {
    "one rank": {},
    "windows": {"model": {"model_type": "mistral", "sliding_window": 9}},
    "breadth first": {"ethernet": {"schedule": "breadth_first"}},
    "sharded": {"ranks": 2},
    "context, gathered": {"ranks": 2, "parallel": {"context": 2}},
    "context, exchanged": {"ranks": 2, "parallel": {"context": 2, "context_rule": "ulysses"}},
    "pipeline": {"ranks": 2, "parallel": {"pipeline": 2}},
}


@pytest.fixture(scope="module", autouse=True)
def compiler():
    import_compiler()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 8 rows, each followed by short ones of 4 rows in all."""
    generator = torch.Generator().manual_seed(0)
    lengths = [8 * LENGTH, *[7, 5, 12] * 4] * 20
    documents = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


def recipe_of(corpus, folder, *, compiled=True, micro_batch_size=1, model=None, **sections):
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": STEPS},
            "model": MODEL | (model or {}),
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": LENGTH,
                "global_batch_size": 4,
                "micro_batch_size": micro_batch_size,
                "holdout": 0.1,
            },
            "optim": {"learning_rate": 1e-2},
            "validate": {"every": 2, "samples": 5},
            "compute": "float32",
            "compile": {"enabled": compiled},
        }
        | sections
    )


def trained(recipe, world, *, choose=None):
    """Return losses, the number of programs after each step and at the end, and the kinds of the rows."""
    torch.compiler.reset()  # forked ranks know what the process before them compiled
    programs, losses, counts, kinds = [], [], [], set()

    def count(graph, _):
        programs.append(graph)
        return graph.forward

    def note(record):
        losses.extend(record[name] for name in ("loss", "validation_loss") if name in record)

    def after(batch, _):
        counts.append(len(programs))
        ends = batch["cu_seqlens"]
        kinds.update((((ends > row) & (ends <= row + LENGTH)).sum() == 1).item() for row in starts(batch))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply_module, "compile_blocks", partial(compile_blocks, backend=count))
        state = open_state(recipe, world)
    if choose is not None:
        state.model.choose = choose
    train(
        state,
        recipe,
        world,
        meter=StepMeter(flops_per_token=lambda _: 1, peak_flops=1),
        stop_requested=lambda: False,
        sinks=[note],
        on_batch=after,
    )
    return losses, [*counts, len(programs)], kinds


def starts(batch):
    return range(0, batch["input_ids"].numel(), LENGTH)


def only_packed(layout, **_):
    return per_document(layout)


PACKED = ("one rank", "breadth first")


@pytest.fixture(scope="module")
def found(corpus, tmp_path_factory):
    """What each rank of a way trains compiled, and alone: plain, and by the kernel for packed rows alone."""
    folder = tmp_path_factory.mktemp("ways")

    def work(case, world):
        way, _, how = case.partition(": ")
        settings = {name: of for name, of in WAYS[way].items() if name != "ranks"}
        recipe = recipe_of(corpus, folder / case, compiled=not how, **settings)
        return trained(recipe, world, choose=only_packed if how == "packed" else None)

    ranks = {way: settings.get("ranks", 1) for way, settings in WAYS.items()}
    alone = ["one rank: plain", *(f"{way}: packed" for way in PACKED)]
    return RankBatches(ranks | dict.fromkeys(alone, 1), work)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_compiled_after_the_first_step(way, found):
    for _, counts, kinds in found.of(way):
        assert kinds == {True, False}, "rows of one document and of several"
        assert 0 < counts[0] == counts[-1], counts


@pytest.mark.parametrize("way", PACKED)
def test_losses_are_those_of_the_kernel_for_packed_rows_alone(way, found):
    """In float32: the kernels differ by the order of their sums."""
    ((mixed, _, _),), ((alone, _, _),) = found.of(way), found.of(f"{way}: packed")
    assert mixed == pytest.approx(alone, rel=1e-5)


def test_weights_are_not_touched_before_the_first_step(found):
    """A run that compiles, and so passes over its first batch ahead, takes the steps of one that does not."""
    ((compiled, _, _),), ((plain, _, _),) = found.of("one rank"), found.of("one rank: plain")
    assert compiled == plain
